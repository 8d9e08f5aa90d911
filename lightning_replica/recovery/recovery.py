"""Recovery of one rank: from a fault to the point where training goes on."""

import logging
from collections.abc import Callable, Iterable
from dataclasses import dataclass

import torch.distributed as dist

from lightning_replica.errors import CollectiveError, Interrupted, RecoveryError, TransferError
from lightning_replica.grid import Grid
from lightning_replica.recovery.faults import Fault, most_telling
from lightning_replica.recovery.generation import Generations
from lightning_replica.recovery.groups import ProcessGroups
from lightning_replica.recovery.interface import Host, Recoverable
from lightning_replica.recovery.mirror import Mirrors
from lightning_replica.recovery.monitor import Monitor
from lightning_replica.recovery.phases import Phase, Timeline
from lightning_replica.recovery.planner import Mirror, Move, Plan, Report, make_plan
from lightning_replica.recovery.transfer import Channel, Tag
from lightning_replica.works import Work

log = logging.getLogger(__name__)

# A fault while recovering: the next generation begins and recovery starts again. Anything else is a bug or final.
_AGAIN = (CollectiveError, Interrupted, TransferError)


@dataclass(frozen=True)
class Limits:
    """How long and how often recovery tries.

    Attributes:
        max_tries: Recoveries at the same step before the run ends.
        rendezvous_s: How long ranks wait for each other and for a replacement, and how long one recovery is tried.
    """

    max_tries: int = 3
    rendezvous_s: float = 600.0


@dataclass(frozen=True)
class Outcome:
    """What a recovery came to.

    Attributes:
        plan: What was decided.
        faults: What ended each of the generations that this recovery left behind, oldest first.
        replaced: Ranks that are new processes.
        timeline: How long each phase took on this rank.
    """

    plan: Plan
    faults: tuple[Fault, ...]
    replaced: tuple[int, ...]
    timeline: Timeline


class Recovery:
    """Takes one rank through the phases, as often as it takes.

    Args:
        grid: The table of ranks.
        rank: This rank.
        generations: The log of generations, on the main thread's store connection.
        groups: This rank's process groups.
        monitor: Watches for the next generation.
        mirrors: Private states of the peers.
        connect: Makes the groups inside the default one and gives them to whoever uses them.
        wait: Waits for a collective; raises if a peer is gone or the world moves on.
        limits: When to give up.
    """

    def __init__(
        self,
        grid: Grid,
        rank: int,
        generations: Generations,
        groups: ProcessGroups,
        monitor: Monitor,
        mirrors: Mirrors,
        connect: Callable[[], Iterable[dist.ProcessGroup]],
        wait: Callable[[Work], None],
        limits: Limits,
    ) -> None:
        self._grid, self._rank, self._generations, self._groups = grid, rank, generations, groups
        self._monitor, self._mirrors, self._connect, self._wait, self._limits = (
            monitor,
            mirrors,
            connect,
            wait,
            limits,
        )
        self.generation = 0
        self._newborn = False  # a replacement that has nothing yet
        self._committed: tuple[int, tuple[float, ...]] = (0, ())
        self._tries = (0, 0)  # at which step, how many
        self._raised = ""  # this rank's own exception, until a plan has been made of it
        self._doubts: list[int] = []  # whose data has arrived damaged in this recovery, as often as it has
        self._job = generations.job()

    def committed(self, step: int, vector: tuple[float, ...]) -> None:
        """Remembers the newest commit that this rank saw succeed: the one that leads to ``step``."""
        self._committed = (step, vector)

    def recover(self, state: Recoverable, host: Host, newborn: bool, raised: str) -> Outcome:
        """Brings this rank, with all others, to one step.

        Args:
            state: The sharded state. On a replacement its contents do not matter.
            host: The rest of the state.
            newborn: Whether this rank is a replacement.
            raised: The exception of this rank's own that made it stop; empty if it was stopped by others.

        Raises:
            RecoveryError: If the run cannot go on.
        """
        timeline, left = Timeline(), self.generation - newborn
        self._newborn, self._raised, self._doubts = newborn, raised, []
        fault = None if newborn else self._fault(raised) if raised else self._seen("a peer is gone")
        while True:
            try:
                plan, replaced = self._attempt(state, host, fault, timeline)
                faults = tuple(self._generations.fault(k) for k in range(left + 1, self.generation + 1))
                return Outcome(plan, faults, replaced, timeline)
            except _AGAIN as error:
                log.info("rank %d: recovery starts again: %s", self._rank, error)
                fault = self._seen(str(error))
                if timeline.elapsed_s > self._limits.rendezvous_s:
                    raise RecoveryError(
                        f"Recovery has not come through in {timeline.elapsed_s:.0f} s: {error}"
                    ) from error

    def _fault(self, raised: str) -> Fault:
        return Fault("exception", (self._rank,), f"rank {self._rank}: {raised}")

    def _seen(self, what: str) -> Fault:
        return Fault("peer gone", (), f"rank {self._rank}: {what}")

    def _attempt(
        self, state: Recoverable, host: Host, fault: Fault | None, timeline: Timeline
    ) -> tuple[Plan, tuple[int, ...]]:
        timeline.enter(Phase.STOP)
        if fault is not None:
            self._generations.begin(self.generation + 1, fault)
        timeline.enter(Phase.CLEAN)
        self._groups.close()
        timeline.enter(Phase.REGROUP)
        self.generation = self._generations.newest(self.generation)
        self._monitor.moved_to(self.generation)
        reports = self._exchange_reports(self._report(state, host))
        plan = make_plan(reports, self._grid, self._limits.max_tries)
        self._raised = ""  # dealt with; should another rank raise from here on, not "every rank" has in one attempt
        self._groups.open(self.generation, self._connect)
        timeline.enter(Phase.REPAIR)
        if self._rank in plan.forward:
            state.roll_forward(plan.commit)
        self._committed = (plan.step, plan.commit)
        if not self._newborn:
            host.restore_groups(plan.kind, plan.step)
        state.roll_back(plan.kind)
        for move in plan.moves:
            self._move(move, plan, state, host)
        timeline.enter(Phase.ROLLBACK)
        state.rebuild()
        host.restore(plan.kind, plan.step)
        timeline.enter(Phase.RESUME)
        # A replacement holds no private state of its peers yet: give it theirs, and them its own.
        self._mirrors.keep(plan.kind, plan.step)
        self._mirrors.begin(plan.kind, plan.step, host.private(plan.kind, plan.step))
        self._mirrors.settle()
        self._count_try(plan.step, max(report.tries for report in reports))
        timeline.end()
        return plan, tuple(report.rank for report in reports if report.newborn)

    def _report(self, state: Recoverable, host: Host) -> Report:
        if self._newborn:
            return Report(self._rank, -1, False, False, -1, (), (), (), doubts=tuple(self._doubts))
        committed, vector = self._committed
        if state.commit_vector is not None and state.step + 1 > committed:
            committed, vector = state.step + 1, state.commit_vector
        step, tries = self._tries
        return Report(
            rank=self._rank,
            step=state.step,
            intact=not state.torn,
            entered=state.entered,
            committed=committed,
            commit=vector,
            batch=host.held("batch"),
            tail=host.held("tail"),
            mirrors=self._mirrors.held(),
            tries=tries if step == state.step else 0,
            raised=self._raised,
            doubts=tuple(self._doubts),
        )

    def _exchange_reports(self, own: Report) -> list[Report]:
        topic, timeout_s = f"report/{self.generation}", self._limits.rendezvous_s
        plain = self._generations.share(
            topic, self._rank, own.to_plain(), self.generation, self._grid.world_size, timeout_s
        )
        return [Report.from_plain(report) for report in plain]

    def _move(self, move: Move, plan: Plan, state: Recoverable, host: Host) -> None:
        if self._rank not in (move.source, move.target):
            return
        tag = Tag(self._job, self.generation, plan.step)
        with Channel(move.source, move.target, self._groups, self._wait, tag) as channel:
            if self._rank == move.source:
                self._give(channel, move, plan, state, host)
                return
            try:
                self._take(channel, move, plan, state, host)
            except TransferError as error:
                self._doubt(move.source, error)
                raise
            log.info(
                "rank %d: got %.1f MB from rank %d in %.3f s, %.0f MB/s",
                self._rank,
                channel.bytes_moved / 1e6,
                move.source,
                channel.seconds,
                channel.bytes_moved / 1e6 / channel.seconds,
            )

    def _doubt(self, source: int, error: TransferError) -> None:
        """Another peer is asked next time, if there is one; but not for ever."""
        self._doubts.append(source)
        if len(self._doubts) >= self._limits.max_tries:
            raise RecoveryError(
                f"Rank {self._rank} could not get its shard {len(self._doubts)} times, from ranks"
                f" {', '.join(map(str, self._doubts))}: {error}"
            ) from error

    def _give(self, channel: Channel, move: Move, plan: Plan, state: Recoverable, host: Host) -> None:
        if move.host:
            own = host.private(plan.kind, plan.step)
            channel.send_plain(
                {
                    "replicated": host.export(plan.kind, plan.step),
                    "private": self._mirrors.payload(Mirror(move.target, plan.kind, plan.step)),
                    "peers": self._mirrors.share(move.target, plan.kind, plan.step, own),
                }
            )
        manifest, tensors = state.export_shard()
        channel.send_plain(manifest)
        for tensor in tensors:
            channel.send(tensor)

    def _take(self, channel: Channel, move: Move, plan: Plan, state: Recoverable, host: Host) -> None:
        if move.host:
            came = channel.receive_plain()
            host.adopt(plan.kind, plan.step, came["replicated"], came["private"])
            self._mirrors.adopt(plan.kind, plan.step, came["peers"])
        state.import_shard(channel.receive_plain(), channel.receive)
        if state.step != plan.step:
            raise TransferError(f"Rank {move.source} sent its shard at step {state.step}, not {plan.step}.")
        self._newborn = False  # it has all that its peers have; should another be lost now, it can give

    def _count_try(self, step: int, tries: int) -> None:
        self._tries = (step, tries + 1)


def describe(outcome: Outcome) -> str:
    """One line that says what happened and how long it took."""
    who = ", ".join(map(str, outcome.replaced))
    what = f"rank {who} was replaced" if outcome.replaced else "no process was lost"
    seconds = ", ".join(f"{phase.value} {s:.3f}" for phase, s in outcome.timeline.seconds.items())
    again = "batch is done again" if outcome.plan.kind == "batch" else "tail of the step is done again"
    return (
        f"recovered at step {outcome.plan.step} in {outcome.timeline.total_s:.2f} s: {what}, the {again}"
        f" ({seconds} s; {most_telling(outcome.faults).text})"
    )
