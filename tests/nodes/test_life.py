"""Who is lost: only a node that gives no sign of life for as long as the time-out, while somebody looks."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lightning_replica.errors import ProtocolError
from lightning_replica.nodes.life import Life, Sign


def signs(*counts: float) -> dict[int, Sign]:
    return {node: Sign(int(count)) for node, count in enumerate(counts, 1)}


def test_a_silent_node_is_lost_after_the_time_out() -> None:
    life = Life(10.0, 2.0)
    seen = [life.look(signs(second, min(second, 6)), float(second)) for second in range(0, 21, 2)]
    assert seen[:8] == [frozenset()] * 8  # node 2 was last heard at 6 s
    assert seen[8:] == [frozenset({2})] * 3


def test_the_next_look_is_when_a_node_s_time_is_over() -> None:
    life = Life(10.0, 2.5)
    life.look(signs(1, 1), 0.0)
    assert life.next_look_s == 2.5
    for now in (2.4, 4.8, 7.2, 9.6):
        assert life.look(signs(now, 1), now) == frozenset()
    assert 0.39 < life.next_look_s < 0.41
    assert life.look(signs(10.0, 1), 10.0) == frozenset({2})
    assert life.next_look_s == 2.5


def test_nobody_is_lost_because_the_one_who_looks_was_stopped() -> None:
    life = Life(10.0, 2.0)
    assert life.look(signs(0), 0.0) == frozenset()
    assert life.look(signs(0), 1000.0) == frozenset()
    assert life.look(signs(1), 1000.1) == frozenset()


def test_a_node_that_is_new_has_the_whole_time() -> None:
    life = Life(10.0, 2.0)
    for second in range(0, 100, 2):
        life.look(signs(second), float(second))
    assert life.look(signs(100, 0), 100.0) == frozenset()
    assert life.look(signs(102, 0), 109.0) == frozenset()


def test_a_node_that_was_not_watched_for_a_while_has_the_whole_time() -> None:
    life = Life(10.0, 2.0)
    for second in range(0, 10, 2):
        life.look(signs(0, second), float(second))
    for second in range(10, 20, 2):
        life.look({2: Sign(second)}, float(second))
    assert life.look(signs(0, 20), 20.0) == frozenset()
    assert life.look(signs(0, 22), 22.0) == frozenset()


def test_a_node_whose_ranks_have_ended_is_not_lost() -> None:
    life, ended = Life(10.0, 2.0), {1: Sign(3, code=0)}
    assert not any(life.look(ended, float(second)) for second in range(0, 100, 2))


@given(st.lists(st.tuples(st.floats(0.0, 30.0), st.booleans()), max_size=60))
def test_a_node_that_has_been_heard_within_the_time_out_is_alive(looks: list[tuple[float, bool]]) -> None:
    life, now, heard, count = Life(10.0, 2.0), 0.0, 0.0, 0
    life.look(signs(count), now)
    for passed, beats in looks:
        now += passed
        count += beats
        heard = now if beats else heard
        if life.look(signs(count), now):
            assert now - heard >= 10.0


def test_nodes_stall_if_they_say_so_twice() -> None:
    life = Life(10.0, 2.0)

    def stall(count: int, *stalls: bool) -> bool:
        found = {node: Sign(count, None, each) for node, each in enumerate(stalls, 1)}
        said = life.all_stall(found, {1, 2})
        life.look(found, float(count))
        return said

    assert [stall(1, True, True), stall(1, True, True), stall(2, True, True)] == [False, False, True]
    assert [stall(3, True, False), stall(4, True, True), stall(5, True, True)] == [False, False, True]
    assert not life.all_stall({1: Sign(9, None, True)}, {1, 2})
    assert life.all_stall({}, ())


@given(st.integers(0, 2**62), st.none() | st.integers(0, 255), st.booleans())
def test_a_line_of_json(count: int, code: int | None, stalls: bool) -> None:
    assert Sign.from_json(Sign(count, code, stalls).to_json().encode()) == Sign(count, code, stalls)


@pytest.mark.parametrize("line", [b"", b"7", b"[]", b"null", b'["a", 0]', b"[1, 2, 3, 4]", b"[1, 2]", b"\xff"])
def test_what_is_no_sign_of_life(line: bytes) -> None:
    with pytest.raises(ProtocolError, match="is no sign of life"):
        Sign.from_json(line)
