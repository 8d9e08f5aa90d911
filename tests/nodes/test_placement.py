"""Which node has which ranks: whatever is lost, ranks keep their numbers and nobody has two slots by accident."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lightning_replica.errors import ProtocolError
from lightning_replica.nodes.placement import VACANT, Placement, ranks_of


@given(st.integers(1, 8), st.sets(st.integers(0, 15)), st.sets(st.integers(0, 15)), st.sets(st.integers(0, 7)))
def test_spares_take_the_slots_of_lost_nodes(count: int, lost: set[int], alive: set[int], vacant: set[int]) -> None:
    before = Placement(tuple(VACANT if slot in vacant else slot for slot in range(count)))
    after = before.replacing(lost, alive)
    free = sorted(alive - lost - before.nodes)
    open_ = [slot for slot, holder in enumerate(before.slots) if holder == VACANT or holder in lost]
    assert [after.slots[slot] for slot in open_] == (free + [VACANT] * count)[: len(open_)]
    assert all(after.slots[slot] == before.slots[slot] for slot in range(count) if slot not in open_)
    assert after.moved == tuple(open_[: len(free)])
    assert not after.nodes & lost
    assert after.vacant == tuple(open_[len(free) :])


def test_a_node_that_comes_later_takes_a_vacant_slot() -> None:
    vacant = Placement((0, 1, 2)).replacing({1}, {0, 2})
    assert vacant == Placement((0, VACANT, 2))
    assert vacant.replacing((), {0, 2, 3, 4}) == Placement((0, 3, 2), (1,))


@given(st.integers(1, 8), st.sets(st.integers(0, 7)), st.integers(0, 3))
def test_nodes_that_are_left_double_up_and_spread_again(count: int, lost: set[int], come: int) -> None:
    before = Placement(tuple(range(count))).replacing(lost, set(range(count)))
    if not before.nodes:
        return
    crowded = before.doubled()
    assert not crowded.vacant
    assert crowded.moved == before.vacant
    assert crowded.nodes == before.nodes
    sizes = [len(crowded.of(node)) for node in crowded.nodes]
    assert max(sizes) - min(sizes) <= 1
    assert all(crowded.slots[slot] == slot for slot in before.nodes)
    node = max(crowded.nodes, key=lambda node: len(crowded.of(node)))
    slots = crowded.crowd(node)[:1]
    new = set(range(100, 100 + come))
    after = crowded.replacing((), crowded.nodes).spread(slots, crowded.nodes | new)
    assert after.moved == tuple(slots)
    for slot, (then, now) in enumerate(zip(crowded.slots, after.slots, strict=True)):
        assert now == (100 if slot in slots and come else then)


@given(st.lists(st.integers(-1, 99), min_size=1), st.sets(st.integers(0, 9)))
def test_a_line_of_json(slots: list[int], moved: set[int]) -> None:
    placement = Placement(tuple(slots), tuple(sorted(each for each in moved if each < len(slots))))
    assert Placement.from_json(placement.to_json()) == placement
    assert {slot for node in {*slots} for slot in placement.of(node)} == set(range(len(slots)))


@pytest.mark.parametrize("line", ["", "[]", "7", '[["a"], []]', "null", "[[1], 2]", "[[1], [1]]", "[[1], [0], 3]"])
def test_what_is_no_placement(line: str) -> None:
    with pytest.raises(ProtocolError, match="is no placement of nodes"):
        Placement.from_json(line)


def test_ranks() -> None:
    assert ranks_of((0, 2), 3) == (0, 1, 2, 6, 7, 8)
    assert ranks_of((), 3) == ()
