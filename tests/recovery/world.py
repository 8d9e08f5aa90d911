"""A model of ranks that train and recover, for tests/recovery/test_exploration.py.

A step T -> T+1 of every rank, and every phase of a recovery, as a program counter; what a rank holds beside it. A rank
moves by itself, or once others have come far enough; what it has sent counts even if it then dies. Steps are 0 and 1
here (T and T+1), so that what a rank holds is a few bits and a world is a tuple of numbers.
"""

import itertools
from collections.abc import Iterator
from typing import NamedTuple

from lightning_replica.core.grid import Grid
from lightning_replica.core.recoverable import Kind
from lightning_replica.recovery.planner import Mirror, Plan, Report

# Recovery. REGROUP is over: all ranks have the plan.
PLANNED, ROLLING, ROLLED, TAKING, REPAIRED, RESTORED, MIRRORING = range(-7, 0)
# Training. Everything before COMMITTED can be undone. START is the tail of the step before, or a window that waits.
START, WINDOW, CONTRIBUTED, REDUCED, MIRRORED, ENTERED, COMMITTED, UPDATING, APPLIED, NEXT_WINDOW = range(10)

T = 5  # what step 0 is called in reports
KINDS: tuple[Kind, ...] = ("batch", "tail")


def bit(kind: str, step: int) -> int:
    """One snapshot, or one mirror: 1 batch T, 2 batch T+1, 4 tail T, 8 tail T+1."""
    return 1 << (2 * (kind == "tail") + step)


FROM_STEP = (15, 10)  # the bits of a step and those after it


class Rank(NamedTuple):
    """One rank.

    ``mirrors`` has the bits of what it holds of each replica's rank of the same shard. ``written`` says that the shard
    has taken what hooks of the tail wrote to weights, as it does when a window begins; in the tail it must not have.
    """

    at: int
    step: int
    known: int  # the newest step that it knows to be committed
    held: int
    mirrors: tuple[int, ...]
    torn: bool = False
    entered: bool = False
    new: bool = False
    raised: bool = False
    corrupted: bool = False  # torn as well
    written: bool = False


State = tuple[Rank, ...]


class Rule:
    """How a rank moves.

    Args:
        grid: The table of ranks.
        enter_when_reduced: The commit rule; a test turns it off.
    """

    def __init__(self, grid: Grid, enter_when_reduced: bool = True) -> None:
        self.grid = grid
        self.peers = [tuple(p for p in grid.peers(rank) if p != rank) for rank in range(grid.size)]
        self.replica = [grid.replica_of(rank) for rank in range(grid.size)]
        self.beside = [grid.replica_ranks(rank) for rank in range(grid.size)]
        self._enter_when_reduced = enter_when_reduced

    def start(self) -> State:
        """Every rank in the tail of step T."""
        return tuple(
            Rank(START, 0, 0, bit("tail", 0), self.with_mirrors((0,) * self.grid.replicas, rank, bit("tail", 0)))
            for rank in range(self.grid.size)
        )

    def replacement(self) -> Rank:
        """A replacement."""
        return Rank(PLANNED, 0, 0, 0, (0,) * self.grid.replicas, new=True)

    def with_mirrors(self, mirrors: tuple[int, ...], rank: int, what: int) -> tuple[int, ...]:
        """With ``what`` of every peer added."""
        own = self.replica[rank]
        return tuple(held if place == own else held | what for place, held in enumerate(mirrors))

    def next(self, state: State, plan: Plan | None, rank: int) -> Rank | None:
        """What ``rank`` is after its next move; None if it has to wait."""
        return self._train(state, rank) if state[rank].at >= START else self._recover(state, plan, rank)

    def _train(self, state: State, rank: int) -> Rank | None:
        own = state[rank]
        at, step = own.at, own.step
        if at == START:  # the window begins; what came before is forgotten
            mirrors = tuple(held & FROM_STEP[step] for held in own.mirrors)
            held = own.held & FROM_STEP[step] | bit("batch", step)
            return own._replace(at=NEXT_WINDOW if step else WINDOW, held=held, mirrors=mirrors, written=True)
        if at == WINDOW:
            return own._replace(at=CONTRIBUTED)
        if at == CONTRIBUTED:  # reductions need every rank's gradient
            return own._replace(at=REDUCED) if all(other.at >= CONTRIBUTED for other in state) else None
        if at == REDUCED:  # the batch's mirrors are waited for, the tail's are begun
            mirrors = self.with_mirrors(own.mirrors, rank, bit("batch", 0))
            return own._replace(at=MIRRORED, held=own.held | bit("tail", 1), mirrors=mirrors)
        if at == MIRRORED:  # the commit is entered once the peers' private states are here
            if not all(state[peer].at >= MIRRORED for peer in self.peers[rank]):
                return None
            mirrors = self.with_mirrors(own.mirrors, rank, bit("tail", 1))
            return own._replace(at=ENTERED, mirrors=mirrors, entered=True)
        if at == ENTERED:  # the all-reduce needs every rank
            least = ENTERED if self._enter_when_reduced else CONTRIBUTED
            return own._replace(at=COMMITTED, known=1) if all(other.at >= least for other in state) else None
        if at == COMMITTED:
            return own._replace(at=UPDATING, torn=True, entered=False)
        if at == UPDATING:
            return own._replace(at=APPLIED, torn=False, step=1, written=False)
        if at == APPLIED:
            mirrors = tuple(held & FROM_STEP[1] for held in own.mirrors)
            held = own.held & FROM_STEP[1] | bit("batch", 1)
            return own._replace(at=NEXT_WINDOW, held=held, mirrors=mirrors, written=True)
        return None

    def _recover(self, state: State, plan: Plan | None, rank: int) -> Rank | None:
        assert plan is not None
        own, step = state[rank], plan.step - T
        goal = bit(plan.kind, step)
        if own.at == PLANNED:
            if rank in plan.forward:
                return own._replace(at=ROLLING, known=step, torn=True, entered=False)
            return self._roll_back(own, plan)
        if own.at == ROLLING:
            return self._roll_back(own._replace(step=step, torn=False, written=False), plan)
        if own.at == ROLLED:
            if any(move.target == rank for move in plan.moves):
                source = next(move.source for move in plan.moves if move.target == rank)
                return own._replace(at=TAKING, torn=not own.new) if state[source].at == ROLLED else None
            given = all(state[move.target].at > TAKING for move in plan.moves if move.source == rank)
            return own._replace(at=REPAIRED) if given else None
        if own.at == TAKING:
            return self._take(state, plan, rank)
        if own.at == REPAIRED:  # the gather needs the whole replica
            whole = all(state[other].at >= REPAIRED for other in self.beside[rank])
            return own._replace(at=RESTORED, held=goal) if whole else None
        if own.at == RESTORED:
            return own._replace(at=MIRRORING, mirrors=tuple(held & goal for held in own.mirrors))
        if not all(state[peer].at >= MIRRORING for peer in self.peers[rank]):
            return None
        return own._replace(at=START, mirrors=self.with_mirrors(own.mirrors, rank, goal))

    def _roll_back(self, own: Rank, plan: Plan) -> Rank:
        if own.new:
            return own._replace(at=ROLLED)
        written = own.written and plan.kind == "batch"
        goal = bit(plan.kind, plan.step - T)  # from here on there is no other way
        return own._replace(at=ROLLED, known=plan.step - T, entered=False, written=written, held=goal)

    def _take(self, state: State, plan: Plan, rank: int) -> Rank:
        own, step = state[rank], plan.step - T
        move = next(move for move in plan.moves if move.target == rank)
        taken = own._replace(at=REPAIRED, step=step, torn=False, corrupted=False, written=state[move.source].written)
        if not move.host:
            return taken
        goal = bit(plan.kind, step)
        giver = [held & goal for held in state[move.source].mirrors]
        giver[self.replica[move.source]], giver[self.replica[rank]] = goal, 0
        return taken._replace(known=step, held=goal, mirrors=tuple(giver), new=False)

    def arrivals(self, state: State, plan: Plan | None, each: bool) -> Iterator[State]:
        """What may have arrived, of mirrors that nobody waits for yet.

        Args:
            state: The world as it stops.
            plan: Of the recovery under way.
            each: Whether every message may or may not have arrived; otherwise all or none have.
        """
        messages = [
            (rank, self.replica[peer], what)
            for rank, own in enumerate(state)
            for what, least in self._begun(own, plan)
            for peer in self.peers[rank]
            if state[peer].at >= least and not own.mirrors[self.replica[peer]] & what
        ]
        subsets = itertools.product((False, True), repeat=len(messages)) if each else [[False], [True]]
        for chosen in subsets if messages else [()]:
            ranks = list(state)
            for (rank, place, what), has in zip(messages, chosen if each else chosen * len(messages), strict=True):
                if has:
                    mirrors = list(ranks[rank].mirrors)
                    mirrors[place] |= what
                    ranks[rank] = ranks[rank]._replace(mirrors=tuple(mirrors))
            yield tuple(ranks)

    def _begun(self, own: Rank, plan: Plan | None) -> Iterator[tuple[int, int]]:
        """The exchange that a rank is in: what is sent, and from where on a peer has sent it."""
        if WINDOW <= own.at <= REDUCED:
            yield bit("batch", 0), WINDOW
        elif own.at == MIRRORED:
            yield bit("tail", 1), MIRRORED
        elif own.at == NEXT_WINDOW:
            yield bit("batch", 1), NEXT_WINDOW
        elif own.at == MIRRORING and plan is not None:
            yield bit(plan.kind, plan.step - T), MIRRORING

    def report(self, state: State, rank: int) -> Report:
        """What ``rank`` says when the world has stopped."""
        own = state[rank]
        if own.new:
            return Report(rank, -1, False, False, -1, (), (), ())
        steps = {kind: tuple(T + step for step in (0, 1) if own.held & bit(kind, step)) for kind in KINDS}
        mirrors = tuple(
            Mirror(peer, kind, T + step)
            for peer in self.peers[rank]
            for kind in KINDS
            for step in (0, 1)
            if own.mirrors[self.replica[peer]] & bit(kind, step)
        )
        return Report(
            rank=rank,
            step=T + own.step,
            intact=not own.torn,
            entered=own.entered,
            committed=T + own.known,
            commit=(float(T + own.known),),
            batch=steps["batch"],
            tail=steps["tail"],
            mirrors=mirrors,
            raised="raised" if own.raised else "",
            corrupted="bits" if own.corrupted else "",
        )
