"""The dying gasp: the survivors, which together hold every shard, write one complete checkpoint.

It is a recovery in which no rank is given a shard. The survivors report, the commit rule decides the step, and the
ranks that missed the commit roll forward. Then they write, in a process group of their own that no dead rank can hold
up. If another rank is lost meanwhile, a new generation begins. The remaining ranks then start again without the lost
one, as long as every shard has a holder.
"""

import logging
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from lightning_replica.control import keys
from lightning_replica.control.faults import Fault
from lightning_replica.control.gathering import Conclude
from lightning_replica.control.generation import Generations
from lightning_replica.control.monitor import Monitor
from lightning_replica.core.grid import Table
from lightning_replica.core.points import reach
from lightning_replica.core.recoverable import HostState, Recoverable
from lightning_replica.errors import RecoveryError
from lightning_replica.groups.world import ProcessGroups
from lightning_replica.recovery.conclusion import read_reports
from lightning_replica.recovery.diagnosis import begins_again
from lightning_replica.recovery.fitness import clean
from lightning_replica.recovery.planner import Decision, Report, can_send, decide

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class GaspPlan(Decision):
    """What the survivors do.

    Attributes:
        left: The survivors, in ascending order.
        ranks: Those of them that write, in their order in the group: they hold the host state.
        pieces: For each of these ranks, the ranks whose part of the shards it writes.
        privates: For each of these ranks, the ranks whose private state it provides.
    """

    left: tuple[int, ...]
    ranks: tuple[int, ...]
    pieces: Mapping[int, tuple[int, ...]]
    privates: Mapping[int, tuple[int, ...]]

    def to_plain(self) -> dict[str, Any]:
        """Return the plan as plain data for JSON, which keeps every bit of a float."""
        lists = {name: [*getattr(self, name).items()] for name in ("pieces", "privates")}
        return {**asdict(self), **lists}

    @classmethod
    def from_plain(cls, plain: dict[str, Any]) -> "GaspPlan":
        """Return the plan that `to_plain` has turned into ``plain``."""
        tuples = {name: tuple(plain[name]) for name in ("commit", "forward", "left", "ranks")}
        maps = {name: _frozen(dict(plain[name])) for name in ("pieces", "privates")}
        return cls(**{**plain, **tuples, **maps})


def make_gasp_plan(reports: Sequence[Report], table: Table) -> GaspPlan:
    """Decide the step, and who writes what. A pure function: the plan is the same on every rank.

    Args:
        reports: The reports of the survivors.
        table: Which rank owns which shard.

    Raises:
        RecoveryError: If all holders of a shard are lost, or none of them holds the host state.
        ProtocolError: If the reports contradict the commit rule.
    """
    left = {report.rank: report for report in reports}
    everyone = [left.get(rank, Report.of_nothing(rank)) for rank in range(table.size)]
    decision = decide(everyone, table)
    step, kind = decision.step, decision.kind
    ranks = tuple(report.rank for report in everyone if report.holds(kind, step))
    holders = [rank for rank in ranks if everyone[rank].intact]
    if not {table.shard_of(rank) for rank in holders} >= set(range(table.shards)):
        raise RecoveryError(f"Some shard has no holder with the host state of step {step}.")
    pieces: dict[int, list[int]] = {rank: [] for rank in ranks}
    privates: dict[int, list[int]] = {rank: [] for rank in ranks}
    for rank in range(table.size):
        peers = [rank] if rank in holders else [peer for peer in table.peers(rank) if peer in holders]
        pieces[min(peers, key=lambda peer: len(pieces[peer]))].append(rank)
        if rank in ranks:
            privates[rank].append(rank)
            continue
        known = [peer for peer in peers if can_send(everyone[peer], rank, kind, step)]
        if known:
            privates[min(known, key=lambda peer: len(privates[peer]))].append(rank)
    commit, forward = decision.commit, decision.forward
    return GaspPlan(step, kind, commit, forward, tuple(sorted(left)), ranks, _frozen(pieces), _frozen(privates))


class Gasp:
    """One rank's part in a dying gasp.

    Args:
        table: Which rank owns which shard.
        rank: This rank.
        generations: The log of generations of a run that has been given up.
        groups: This rank's process groups.
        monitor: Watches for the next generation.
        conclude: Gives this rank's report in a generation, and returns the conclusion from those of all survivors.
        timeout_s: How many seconds ranks wait for each other.
    """

    def __init__(
        self,
        table: Table,
        rank: int,
        generations: Generations,
        groups: ProcessGroups,
        monitor: Monitor,
        conclude: Callable[[int, dict[str, Any], Conclude], Any],
        timeout_s: float,
    ) -> None:
        self._table, self._rank, self._generations, self._groups = table, rank, generations, groups
        self._monitor, self._conclude, self._timeout_s = monitor, conclude, timeout_s
        self._began = time.monotonic()

    def run(
        self, state: Recoverable, host: HostState, report: Callable[[], Report], write: Callable[[GaspPlan], str]
    ) -> str:
        """Write the checkpoint together with all other survivors.

        Args:
            state: The sharded state.
            host: The rest of the state.
            report: Returns this rank's report.
            write: Writes the checkpoint in the default group, which has the plan's ``ranks``; returns its path.

        Returns:
            The path of the checkpoint.

        Raises:
            RecoveryError: If a shard has no trusted holder left, or other ranks do not come in time.
            DeviceLostError: If this rank cannot use its device any more.
            CheckpointError: If the checkpoint cannot be written.
        """
        self._generations.come_to_save(self._rank)
        generation = 0
        while True:
            generation = self._generations.newest(generation)
            try:
                return self._attempt(generation, state, host, report, write)
            except Exception as error:
                begins_again(error, self._groups.device)
                log.info("rank %d: the last checkpoint is started again: %s", self._rank, error)
                if time.monotonic() - self._began > self._timeout_s:
                    raise RecoveryError(f"The last checkpoint was not written in {self._timeout_s:.0f} s.") from error
                self._generations.begin(generation + 1, Fault("peer gone", (), f"rank {self._rank}: {error}"))

    def _attempt(
        self,
        generation: int,
        state: Recoverable,
        host: HostState,
        report: Callable[[], Report],
        write: Callable[[GaspPlan], str],
    ) -> str:
        reach("gasp")
        if self._generations.saving_is_forbidden():
            raise RecoveryError("The remaining state of this run cannot be trusted. Resume from an earlier checkpoint.")
        device = self._groups.device
        if not device.is_host:
            self._monitor.wake_now()
        self._groups.leave()
        clean(device, state, self._generations)
        self._monitor.moved_to(generation)
        path = self._generations.last_checkpoint()
        if path is not None:  # ranks completed it in an earlier attempt; others may be waiting here
            self._generations.begin(generation + 1, Fault("end", (), "the last checkpoint is written"))
            return path
        plan = self._plan(generation, report())
        if self._rank in plan.ranks:
            self._groups.open_among(generation, plan.ranks)
            if self._rank in plan.forward:
                state.roll_forward(plan.commit)
            host.restore_groups(plan.kind, plan.step)
            state.roll_back(plan.kind)
            reach("gasp_write")
            self._generations.leave_last_checkpoint(write(plan))
        meet, left = self._generations.meet, plan.left
        meet(keys.SAVED, self._rank, generation, left, self._timeout_s, given_up=True)
        return self._generations.store.get(keys.GASP).decode()

    def _plan(self, generation: int, own: Report) -> GaspPlan:
        """Give this rank's report, and return the plan from those of all survivors."""

        def draw(parts: list[dict[str, Any]]) -> dict[str, Any]:
            reports = read_reports(parts, self._generations.has_corruption, generation)
            return make_gasp_plan(reports, self._table).to_plain()

        return GaspPlan.from_plain(self._conclude(generation, own.to_plain(), draw))


def _frozen(lists: Mapping[int, Sequence[int]]) -> dict[int, tuple[int, ...]]:
    return {rank: tuple(each) for rank, each in lists.items()}
