"""Which groups are opened again after a fault: all ranks must come to the same."""

from datetime import timedelta
from typing import Any

import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st

from lightning_replica._compat.groups import NewGroup
from lightning_replica.control.journal import Journal
from lightning_replica.groups.handles import Handle
from lightning_replica.groups.names import Name
from lightning_replica.groups.user_groups import UserGroups

RANKS = 3
SETS = ((0, 1, 2), (0, 1), (1, 2))


class Rank:
    """One rank's books, with groups that only remember what they were opened as."""

    def __init__(self, rank: int, segments: int = 0) -> None:
        self.rank = rank
        self.journal = Journal(dist.HashStore(), rank, reading=segments)
        self.opened: list[str] = []
        self.books = UserGroups(rank, self.journal, timedelta(seconds=1), self.open, lambda _: None)

    def open(self, key: str, _: NewGroup) -> Any:
        self.opened.append(key)
        return dist.ProcessGroup(0, 1)  # type: ignore[call-arg]

    def make(self, ranks: tuple[int, ...]) -> Handle | None:
        if self.rank not in ranks:
            return None
        made = self.books.answer(NewGroup(ranks, ranks.index(self.rank), "gloo", timedelta(seconds=1)))
        assert isinstance(made, Handle)
        return made


def regroup(world: list[Rank], generation: int) -> None:
    held = {each.rank: each.books.held() for each in world}
    for each in world:
        each.opened = []
        each.books.disconnect()
        each.books.connect(generation, dist.ProcessGroup(0, 1), held)  # type: ignore[call-arg]


def agree(world: list[Rank]) -> None:
    """Whoever opens a group meets all its members there, and all open them in the same order."""
    keys = sorted({key for each in world for key in each.opened})
    for key in keys:
        members = Name.of(key).ranks
        assert [each.rank for each in world if key in each.opened] == [*members]
    for each in world:
        assert each.opened == sorted(each.opened)


ACTS = st.lists(st.tuples(st.sampled_from(["make", "destroy", "lose"]), st.sampled_from(SETS), st.integers(0, 2)))


@given(before=st.lists(st.sampled_from(SETS)), acts=ACTS)
def test_all_open_the_same(before: list[tuple[int, ...]], acts: list[tuple[str, tuple[int, ...], int]]) -> None:
    """Whatever was made and destroyed before: whoever is replaced connects to the groups of the others."""
    world = [Rank(rank) for rank in range(RANKS)]
    made: dict[tuple[int, ...], list[dict[int, Handle]]] = {ranks: [] for ranks in SETS}

    def make(ranks: tuple[int, ...]) -> None:
        handles = {each.rank: handle for each in world if (handle := each.make(ranks)) is not None}
        assert len({handle.key for handle in handles.values()}) == 1
        made[ranks].append(handles)

    for each in world:
        each.books.connect(0, dist.ProcessGroup(0, 1), {})  # type: ignore[call-arg]
    for ranks in before:
        make(ranks)
    for each in world:
        each.journal.close()
    generation = 0
    for act, ranks, rank in acts:
        if act == "make":
            make(ranks)
        elif act == "destroy" and made[ranks]:
            for handle in made[ranks].pop().values():
                handle.shutdown()
        elif act == "lose":
            generation += 1
            world[rank] = Rank(rank, segments=1)
            for set_up in before:
                world[rank].make(set_up)
            world[rank].journal.close()
            regroup(world, generation)
            agree(world)
            for each in world:
                each.books.hooks_are_through()
            for groups in made.values():
                for handles in groups:
                    assert all(handle.behind is not None for member, handle in handles.items() if member != rank)
            break


@given(st.lists(st.integers(0, 40), min_size=1, unique=True), st.sampled_from(["before 1", "in 2", "hooks 5"]))
def test_names_as_text(ranks: list[int], origin: str) -> None:
    name = Name(tuple(ranks), "cpu:gloo,other:its", origin, 3)
    assert Name.of(name.key) == name


def test_many_ranks_have_a_short_name() -> None:
    assert len(Name(tuple(range(10_000)), "gloo", "in 1", 0).key) < 30


def test_default_group_destroyed_by_user_code() -> None:
    ended = []
    books = UserGroups(
        0,
        Journal(dist.HashStore(), 0),
        timedelta(seconds=1),
        lambda key, wanted: dist.ProcessGroup(0, 1),  # type: ignore[call-arg]
        lambda _: None,
        lambda: ended.append(True),
    )
    books.answer(NewGroup((0, 1), 0, "gloo", timedelta(seconds=1), is_default=True)).shutdown()
    assert ended == [True]
    assert books.default is None
