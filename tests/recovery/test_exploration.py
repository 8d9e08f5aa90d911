"""The commit rule and the planner, explored exhaustively: one fault, on any rank, at any point, in any interleaving.

The model is a step t -> t+1 of every rank as a program counter. A rank moves by itself, or once others have come far
enough; what a rank has sent counts even if it then dies. From every reachable state one rank fails, by death, by an
exception or by wrong bits in its shard, the others go on as far as they may, and whenever they stop the planner must
bring all to one step with nothing committed undone. Seen to fail: with `min` for `max` in `make_plan`, with the tail
always or never chosen in `_kind`, with mirrors taken for granted there; and `test_the_rule_is_needed` keeps one such
failure.
"""

import itertools
from collections.abc import Iterator
from dataclasses import replace

import pytest

from lightning_replica.errors import ProtocolError, RecoveryError
from lightning_replica.grid import Grid
from lightning_replica.recovery.planner import Mirror, Report, make_plan

T = 5
# Where a rank is. Everything before COMMITTED can be undone.
TAIL, WINDOW, CONTRIBUTED, REDUCED, MIRRORED, ENTERED, COMMITTED, UPDATING, APPLIED, NEXT_WINDOW = range(10)
State = tuple[int, ...]
HOW = ("raised", "killed", "corrupted")


ENTER_WHEN_REDUCED = True  # the commit rule; `test_the_rule_is_needed` turns it off


def can_move(grid: Grid, state: State, rank: int) -> bool:
    """Whether ``rank`` can take its next step."""
    here = state[rank]
    if here == NEXT_WINDOW:
        return False
    if here == CONTRIBUTED:  # reductions need every rank's gradient
        return all(other >= CONTRIBUTED for other in state)
    if here == MIRRORED:  # the commit is entered once the peers' private states are here
        return all(state[peer] >= MIRRORED for peer in grid.peers(rank))
    if here == ENTERED:  # the all-reduce needs every rank
        return all(other >= (ENTERED if ENTER_WHEN_REDUCED else CONTRIBUTED) for other in state)
    return True


def successors(grid: Grid, state: State, frozen: int | None = None) -> Iterator[State]:
    for rank in range(grid.world_size):
        if rank != frozen and can_move(grid, state, rank):
            yield (*state[:rank], state[rank] + 1, *state[rank + 1 :])


def reachable(grid: Grid, start: State, frozen: int | None = None) -> set[State]:
    seen, todo = {start}, [start]
    while todo:
        for following in successors(grid, todo.pop(), frozen):
            if following not in seen:
                seen.add(following)
                todo.append(following)
    return seen


def report(grid: Grid, state: State, rank: int, late: bool) -> Report:
    """What ``rank`` says; ``late``: of what need not have arrived yet, nothing has."""
    here = state[rank]
    mirrors = []
    for peer in set(grid.peers(rank)) - {rank}:
        if not (here >= NEXT_WINDOW):
            mirrors.append(Mirror(peer, "tail", T))
        if here >= MIRRORED + 1 or (not late and min(state[peer], here) >= WINDOW):
            mirrors.append(Mirror(peer, "batch", T))
        if here >= ENTERED or (not late and min(state[peer], here) >= MIRRORED):
            mirrors.append(Mirror(peer, "tail", T + 1))
        if not late and min(state[peer], here) >= NEXT_WINDOW:
            mirrors.append(Mirror(peer, "batch", T + 1))
    committed = T + 1 if here >= COMMITTED else T
    batch = {TAIL: T - 1, NEXT_WINDOW: T + 1}.get(here, T)
    tail = (T, T + 1) if MIRRORED <= here < NEXT_WINDOW else (T + 1 if here == NEXT_WINDOW else T,)
    return Report(
        rank=rank,
        step=T + 1 if here >= APPLIED else T,
        intact=here != UPDATING,
        entered=here in (ENTERED, COMMITTED),
        committed=committed,
        commit=(float(committed),),
        batch=(batch,),
        tail=tail,
        mirrors=tuple(mirrors),
        raised="",
    )


def check(grid: Grid, state: State, failed: int, how: str, late: bool) -> None:
    reports = [report(grid, state, rank, late) for rank in range(grid.world_size)]
    killed = how == "killed"
    if killed:
        reports[failed] = Report(failed, -1, False, False, -1, (), (), ())
    if how == "corrupted":
        reports[failed] = replace(reports[failed], intact=False, corrupted="bits")
    plan = make_plan(reports, grid, 3)
    live = [r for r in reports if not r.newborn]
    # Nothing that a live rank saw committed is undone, and nothing is made up.
    assert plan.step == max(r.committed for r in live)
    # Every rank ends at that step: by being there, by rolling forward with its own gradient, or from a peer that is.
    arrives = {r.rank for r in live if r.intact and r.step == plan.step} | set(plan.forward)
    for rank in plan.forward:
        assert reports[rank].intact
        assert state[rank] in (ENTERED, COMMITTED)
        assert plan.commit == (float(T + 1),)
    for move in plan.moves:
        assert move.source in arrives
        assert grid.shard_of(move.source) == grid.shard_of(move.target)
    assert arrives | {move.target for move in plan.moves} == set(range(grid.world_size))
    # Everyone can go on from there.
    assert all(r.holds(plan.kind, plan.step) for r in live)
    for move in plan.moves:
        if move.host:
            assert Mirror(move.target, plan.kind, plan.step) in reports[move.source].mirrors
    # A batch is only done again if no tail is left undone.
    if plan.kind == "batch":
        assert not plan.forward
        assert all(state[r.rank] in (NEXT_WINDOW,) if plan.step > T else state[r.rank] != TAIL for r in live)
    # And no tail is done again for nothing: only where a survivor could not be made anew at the batch's start.
    # Not with wrong bits, that it may have seen.
    if how == "corrupted" and state[failed] < UPDATING:
        assert plan.kind == "tail"
    mirrored = all(
        any(Mirror(rank, "batch", plan.step) in reports[peer].mirrors for peer in grid.peers(rank) if peer != rank)
        for rank in range(grid.world_size)
    )
    if mirrored and how == "raised" and all(WINDOW <= here <= ENTERED for here in state):
        assert plan.kind == "batch"


def stops(grid: Grid, failed: int) -> frozenset[State]:
    """Every state that the world can stop in after ``failed`` has failed somewhere.

    An update waits for nobody, so a rank that has not failed itself is never stopped inside one.
    """
    found: set[State] = set()
    for state in reachable(grid, (TAIL,) * grid.world_size):
        if state not in found:
            found |= reachable(grid, state, frozen=failed)
    return frozenset(s for s in found if all(s[r] != UPDATING for r in range(grid.world_size) if r != failed))


@pytest.mark.parametrize(("world_size", "replicas"), [(2, 2), (3, 3), (4, 2), (4, 4)])
def test_one_fault_anywhere(world_size: int, replicas: int) -> None:
    grid = Grid(world_size, replicas)
    checked = 0
    for failed in range(world_size):
        for state, how, late in itertools.product(stops(grid, failed), HOW, (False, True)):
            check(grid, state, failed, how, late)
            checked += 1
    assert checked > 100


def test_the_rule_is_needed(monkeypatch: pytest.MonkeyPatch) -> None:
    """If a commit could succeed before everyone has a complete gradient, some fault could not be repaired."""
    monkeypatch.setitem(globals(), "ENTER_WHEN_REDUCED", False)
    grid = Grid(2, 2)

    def explore() -> None:
        for state, how in itertools.product(stops(grid, 0), HOW):
            check(grid, state, 0, how, late=True)

    with pytest.raises((AssertionError, ProtocolError, RecoveryError)):
        explore()
