"""Which node has which ranks: whatever is lost, ranks keep their numbers and nobody has two slots by accident."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lightning_replica.errors import ProtocolError
from lightning_replica.nodes.placement import Placement, ranks_of


@given(st.integers(1, 8), st.sets(st.integers(0, 15)), st.sets(st.integers(0, 15)))
def test_spares_take_the_slots_of_lost_nodes(count: int, lost: set[int], alive: set[int]) -> None:
    before = Placement(tuple(range(count)))
    after = before.replacing(lost, alive, 7)
    needed = lost & set(before.slots)
    free = alive - lost - set(before.slots)
    if len(needed) > len(free):
        assert after is None
        return
    assert after is not None
    assert after.generation == 7
    assert len(set(after.slots)) == count
    assert not set(after.slots) & lost
    assert set(after.moved) == {slot for slot in range(count) if slot in needed}
    assert all(after.slots[slot] == before.slots[slot] for slot in range(count) if slot not in after.moved)
    assert sorted(after.slots[slot] for slot in after.moved) == sorted(free)[: len(needed)]


@given(st.lists(st.integers(0, 99), min_size=1), st.integers(0, 9), st.lists(st.integers(0, 9)))
def test_a_line_of_json(slots: list[int], generation: int, moved: list[int]) -> None:
    placement = Placement(tuple(slots), generation, tuple(moved))
    assert Placement.from_json(placement.to_json()) == placement
    assert {slot for node in slots for slot in placement.of(node)} == set(range(len(slots)))


@pytest.mark.parametrize("line", ["", "[]", "7", '[["a"], 0, []]', "null", "[[1], 2]"])
def test_what_is_no_placement(line: str) -> None:
    with pytest.raises(ProtocolError, match="is no placement of nodes"):
        Placement.from_json(line)


def test_ranks() -> None:
    assert ranks_of((0, 2), 3) == (0, 1, 2, 6, 7, 8)
    assert ranks_of((), 3) == ()
