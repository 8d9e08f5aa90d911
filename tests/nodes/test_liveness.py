"""Who is lost: only a node that sends no heartbeat for as long as the time-out, while somebody looks."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lightning_replica.errors import ProtocolError
from lightning_replica.nodes.liveness import Heartbeat, Liveness


def received(*counts: float) -> dict[int, Heartbeat]:
    return {node: Heartbeat(int(count)) for node, count in enumerate(counts, 1)}


def test_a_silent_node_is_lost_after_the_time_out() -> None:
    liveness = Liveness(10.0, 2.0)
    seen = [liveness.look(received(second, min(second, 6)), float(second)) for second in range(0, 21, 2)]
    assert seen[:8] == [frozenset()] * 8  # node 2 was last heard at 6 s
    assert seen[8:] == [frozenset({2})] * 3


def test_the_next_look_is_when_a_node_s_time_is_over() -> None:
    liveness = Liveness(10.0, 2.5)
    liveness.look(received(1, 1), 0.0)
    assert liveness.next_look_s == 2.5
    for now in (2.4, 4.8, 7.2, 9.6):
        assert liveness.look(received(now, 1), now) == frozenset()
    assert 0.39 < liveness.next_look_s < 0.41
    assert liveness.look(received(10.0, 1), 10.0) == frozenset({2})
    assert liveness.next_look_s == 2.5


def test_nobody_is_lost_because_the_one_who_looks_was_stopped() -> None:
    liveness = Liveness(10.0, 2.0)
    assert liveness.look(received(0), 0.0) == frozenset()
    assert liveness.look(received(0), 1000.0) == frozenset()
    assert liveness.look(received(1), 1000.1) == frozenset()


def test_a_node_that_is_new_has_the_whole_time() -> None:
    liveness = Liveness(10.0, 2.0)
    for second in range(0, 100, 2):
        liveness.look(received(second), float(second))
    assert liveness.look(received(100, 0), 100.0) == frozenset()
    assert liveness.look(received(102, 0), 109.0) == frozenset()


def test_a_node_that_was_not_watched_for_a_while_has_the_whole_time() -> None:
    liveness = Liveness(10.0, 2.0)
    for second in range(0, 10, 2):
        liveness.look(received(0, second), float(second))
    for second in range(10, 20, 2):
        liveness.look({2: Heartbeat(second)}, float(second))
    assert liveness.look(received(0, 20), 20.0) == frozenset()
    assert liveness.look(received(0, 22), 22.0) == frozenset()


def test_a_node_whose_ranks_have_ended_is_not_lost() -> None:
    liveness, ended = Liveness(10.0, 2.0), {1: Heartbeat(3, code=0)}
    assert not any(liveness.look(ended, float(second)) for second in range(0, 100, 2))


@given(st.lists(st.tuples(st.floats(0.0, 30.0), st.booleans()), max_size=60))
def test_a_node_that_has_been_heard_within_the_time_out_is_alive(looks: list[tuple[float, bool]]) -> None:
    liveness, now, heard, count = Liveness(10.0, 2.0), 0.0, 0.0, 0
    liveness.look(received(count), now)
    for passed, beats in looks:
        now += passed
        count += beats
        heard = now if beats else heard
        if liveness.look(received(count), now):
            assert now - heard >= 10.0


def test_nodes_stall_if_they_say_so_twice() -> None:
    liveness = Liveness(10.0, 2.0)

    def stall(count: int, *stalls: bool) -> bool:
        found = {node: Heartbeat(count, None, each) for node, each in enumerate(stalls, 1)}
        said = liveness.all_stall(found, {1, 2})
        liveness.look(found, float(count))
        return said

    assert [stall(1, True, True), stall(1, True, True), stall(2, True, True)] == [False, False, True]
    assert [stall(3, True, False), stall(4, True, True), stall(5, True, True)] == [False, False, True]
    assert not liveness.all_stall({1: Heartbeat(9, None, True)}, {1, 2})
    assert liveness.all_stall({}, ())


@given(st.integers(0, 2**62), st.none() | st.integers(0, 255), st.booleans())
def test_a_line_of_json(count: int, code: int | None, stalls: bool) -> None:
    assert Heartbeat.from_json(Heartbeat(count, code, stalls).to_json().encode()) == Heartbeat(count, code, stalls)


@pytest.mark.parametrize("line", [b"", b"7", b"[]", b"null", b'["a", 0]', b"[1, 2, 3, 4]", b"[1, 2]", b"\xff"])
def test_what_is_no_heartbeat(line: bytes) -> None:
    with pytest.raises(ProtocolError, match="is no heartbeat"):
        Heartbeat.from_json(line)
