"""Who is lost: only a node that gives no sign of life for as long as the time-out, while somebody looks."""

from hypothesis import given
from hypothesis import strategies as st

from lightning_replica.nodes.life import Life


def test_a_silent_node_is_lost_after_the_time_out() -> None:
    life = Life(10.0, 2.0)
    seen = [life.look({1: second, 2: min(second, 6)}, float(second)) for second in range(0, 21, 2)]
    assert seen[:9] == [frozenset()] * 9  # node 2 was last heard at 6 s
    assert seen[9:] == [frozenset({2})] * 2


def test_nobody_is_lost_because_the_one_who_looks_was_stopped() -> None:
    life = Life(10.0, 2.0)
    assert life.look({1: 0}, 0.0) == frozenset()
    assert life.look({1: 0}, 1000.0) == frozenset()
    assert life.look({1: 1}, 1000.1) == frozenset()


def test_a_node_that_is_new_has_the_whole_time() -> None:
    life = Life(10.0, 2.0)
    for second in range(0, 100, 2):
        life.look({1: second}, float(second))
    assert life.look({1: 100, 2: 0}, 100.0) == frozenset()
    assert life.look({1: 102, 2: 0}, 110.0) == frozenset()


@given(st.lists(st.tuples(st.floats(0.0, 30.0), st.booleans()), max_size=60))
def test_a_node_that_has_been_heard_within_the_time_out_is_alive(looks: list[tuple[float, bool]]) -> None:
    life, now, heard, counter = Life(10.0, 2.0), 0.0, 0.0, 0
    life.look({1: counter}, now)
    for passed, beats in looks:
        now += passed
        counter += beats
        heard = now if beats else heard
        if life.look({1: counter}, now):
            assert now - heard > 10.0
