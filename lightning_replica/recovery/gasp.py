"""The dying gasp: whoever is left and together holds every shard writes one complete checkpoint.

It is recovery without anybody to give a shard to. Those who are left report, the commit rule decides the step, those
who missed the commit roll forward, and then all write, in a process group of their own that no dead rank can hold up.
Who is lost meanwhile begins a generation; the others start again without it, for as long as every shard has a holder.
"""

import logging
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from lightning_replica.errors import RecoveryError
from lightning_replica.grid import Grid
from lightning_replica.points import reach
from lightning_replica.recovery.faults import Fault
from lightning_replica.recovery.fitness import begins_again, clean
from lightning_replica.recovery.generation import Generations
from lightning_replica.recovery.groups import ProcessGroups
from lightning_replica.recovery.interface import Host, Recoverable
from lightning_replica.recovery.monitor import Monitor
from lightning_replica.recovery.planner import Decision, Report, can_send, decide

log = logging.getLogger(__name__)

_DONE = "gasp"


@dataclass(frozen=True)
class GaspPlan(Decision):
    """What those do who are left.

    Attributes:
        ranks: Who takes part, in the order of the group: those who hold the host state.
        pieces: For each of them, the ranks whose part of the shards it writes.
        privates: For each of them, the ranks whose private state it gives.
    """

    ranks: tuple[int, ...]
    pieces: Mapping[int, tuple[int, ...]]
    privates: Mapping[int, tuple[int, ...]]


def make_gasp_plan(reports: Sequence[Report], grid: Grid) -> GaspPlan:
    """Decides the step and who writes what. Pure, the same on every rank.

    Args:
        reports: Of the ranks that are left.
        grid: The table of all ranks.

    Raises:
        RecoveryError: If all holders of a shard are lost, or nobody is left who holds the host state.
        ProtocolError: If the reports contradict the commit rule.
    """
    left = {report.rank: report for report in reports}
    everyone = [left.get(rank, Report.of_nothing(rank)) for rank in range(grid.world_size)]
    decision = decide(everyone, grid)
    step, kind = decision.step, decision.kind
    ranks = tuple(report.rank for report in everyone if report.holds(kind, step))
    holders = [rank for rank in ranks if everyone[rank].intact]
    if not {grid.shard_of(rank) for rank in holders} >= set(range(grid.shards)):
        raise RecoveryError(f"Not every shard has a holder that knows where training stood at step {step}.")
    pieces: dict[int, list[int]] = {rank: [] for rank in ranks}
    privates: dict[int, list[int]] = {rank: [] for rank in ranks}
    for rank in range(grid.world_size):
        peers = [rank] if rank in holders else [peer for peer in grid.peers(rank) if peer in holders]
        pieces[min(peers, key=lambda peer: len(pieces[peer]))].append(rank)
        if rank in ranks:
            privates[rank].append(rank)
            continue
        known = [peer for peer in peers if can_send(everyone[peer], rank, kind, step)]
        if known:
            privates[min(known, key=lambda peer: len(privates[peer]))].append(rank)
    return GaspPlan(step, kind, decision.commit, decision.forward, ranks, _frozen(pieces), _frozen(privates))


class Gasp:
    """One rank's part.

    Args:
        grid: The table of ranks.
        rank: This rank.
        generations: The log of generations, in a run that has been given up.
        groups: This rank's process groups.
        monitor: Watches for the next generation.
        exchange: Gives what this rank has to say in a generation to all that are left, and what they say.
        timeout_s: How long ranks wait for each other.
    """

    def __init__(
        self,
        grid: Grid,
        rank: int,
        generations: Generations,
        groups: ProcessGroups,
        monitor: Monitor,
        exchange: Callable[[int, dict[str, Any]], list[dict[str, Any]]],
        timeout_s: float,
    ) -> None:
        self._grid, self._rank, self._generations, self._groups = grid, rank, generations, groups
        self._monitor, self._exchange, self._timeout_s = monitor, exchange, timeout_s
        self._began = time.monotonic()

    def run(
        self, state: Recoverable, host: Host, report: Callable[[], Report], write: Callable[[GaspPlan], str]
    ) -> str:
        """Writes, with all others that are left.

        Args:
            state: The sharded state.
            host: The rest of the state.
            report: What this rank has to say of itself.
            write: Writes the checkpoint in the default group, which is the plan's ``ranks``; says where it is.

        Returns:
            Where the checkpoint is.

        Raises:
            RecoveryError: If a shard has no holder left that can be trusted, or others do not come.
            DeviceLostError: If this rank cannot use its device any more.
            CheckpointError: If it cannot be written.
        """
        self._generations.store.set(_come(self._rank), "")
        generation = 0
        while True:
            generation = self._generations.newest(generation)
            try:
                return self._attempt(generation, state, host, report, write)
            except Exception as error:
                begins_again(error, self._groups.device)
                log.info("rank %d: the last checkpoint is begun again: %s", self._rank, error)
                if time.monotonic() - self._began > self._timeout_s:
                    raise RecoveryError(f"The last checkpoint was not written in {self._timeout_s:.0f} s.") from error
                self._generations.begin(generation + 1, Fault("peer gone", (), f"rank {self._rank}: {error}"))

    def _attempt(
        self,
        generation: int,
        state: Recoverable,
        host: Host,
        report: Callable[[], Report],
        write: Callable[[GaspPlan], str],
    ) -> str:
        reach("gasp")
        if self._generations.is_spoiled():
            raise RecoveryError("What is left of this run cannot be trusted. Go on from an earlier checkpoint.")
        device = self._groups.device
        if not device.is_host:
            self._monitor.wake_now()
        self._groups.leave()
        clean(device, state, self._generations)
        self._monitor.moved_to(generation)
        path = self.written(self._generations)
        if path is not None:  # in an earlier attempt, by ranks that were through with it; others may be waiting here
            self._generations.begin(generation + 1, Fault("end", (), "the last checkpoint is written"))
            return path
        reports = [Report.from_plain(each) for each in self._exchange(generation, report().to_plain())]
        plan = make_gasp_plan(reports, self._grid)
        if self._rank in plan.ranks:
            self._groups.open_among(generation, plan.ranks)
            if self._rank in plan.forward:
                state.roll_forward(plan.commit)
            host.restore_groups(plan.kind, plan.step)
            state.roll_back(plan.kind)
            reach("gasp_write")
            self._generations.store.set(_DONE, write(plan))
        self._generations.meet("gasp/done", generation, len(reports), self._timeout_s, given_up=True)
        return self._generations.store.get(_DONE).decode()

    @staticmethod
    def has_come(generations: Generations, rank: int) -> bool:
        """Whether a rank has left its training to write; until then, the others wait for it."""
        return generations.store.check([_come(rank)])

    @staticmethod
    def written(generations: Generations) -> str | None:
        """Where the checkpoint of a run that was given up is; None if there is none yet."""
        return generations.store.get(_DONE).decode() if generations.store.check([_DONE]) else None


def _come(rank: int) -> str:
    return f"{_DONE}/come/{rank}"


def _frozen(lists: Mapping[int, Sequence[int]]) -> dict[int, tuple[int, ...]]:
    return {rank: tuple(each) for rank, each in lists.items()}
