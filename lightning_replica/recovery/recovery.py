"""Recovery of one rank: from a fault to the point where training resumes."""

import logging
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from datetime import timedelta
from typing import Any, Final

import torch.distributed as dist

from lightning_replica.control import keys
from lightning_replica.control.faults import Fault
from lightning_replica.control.generation import Generations
from lightning_replica.control.monitor import Monitor
from lightning_replica.core.grid import Table
from lightning_replica.core.options import RecoveryOptions
from lightning_replica.core.pending_work import Work
from lightning_replica.core.recoverable import HostState, Recoverable
from lightning_replica.errors import HookError, RecoveryError, TransferError
from lightning_replica.groups.world import ProcessGroups
from lightning_replica.recovery.conclusion import Conclusion, conclude, read_reports
from lightning_replica.recovery.context import RecoveryContext
from lightning_replica.recovery.diagnosis import OwnFault, begins_again
from lightning_replica.recovery.fitness import clean
from lightning_replica.recovery.incident import Transferred
from lightning_replica.recovery.mirror import Mirrors
from lightning_replica.recovery.phases import Phase, Timeline
from lightning_replica.recovery.planner import Mirror, Move, Plan, Report
from lightning_replica.recovery.transfer import Channel, Tag

log = logging.getLogger(__name__)

_NAMED_S: Final = 1.0
_POLL_S: Final = 0.02


@dataclass(frozen=True)
class Outcome:
    """The result of a recovery.

    Attributes:
        plan: The plan that was carried out.
        generation: The generation in which training resumes.
        timeline: How long each phase took on this rank.
        moves: Shards that this rank has taken.
    """

    plan: Plan
    generation: int
    timeline: Timeline
    moves: tuple[Transferred, ...]


class Recovery:
    """Takes one rank through the phases of a recovery, again and again until one attempt succeeds.

    Args:
        table: Which rank owns which shard.
        rank: This rank.
        generations: The log of generations, on the main thread's store connection.
        groups: This rank's process groups.
        monitor: Watches for the next generation.
        mirrors: Private states of the peers.
        connect: Makes the groups inside the default one and gives them to the code that uses them.
        wait: Waits for a collective; raises if a peer is gone or the world moves on.
        options: The limits after which recovery is given up.
        hook: Called at the end of each phase; raises `HookError` for a fault of its own.

    Attributes:
        planned_step: The step that the newest plan leads to; -1 before the first. A replacement has no other
            information about the step.
    """

    def __init__(
        self,
        table: Table,
        rank: int,
        generations: Generations,
        groups: ProcessGroups,
        monitor: Monitor,
        mirrors: Mirrors,
        connect: Callable[[timedelta], Iterable[dist.ProcessGroup]],
        wait: Callable[[Work], None],
        options: RecoveryOptions,
        hook: Callable[[RecoveryContext], None] | None = None,
    ) -> None:
        self._table, self._rank, self._generations, self._groups = table, rank, generations, groups
        self._monitor, self._mirrors, self._connect, self._wait = monitor, mirrors, connect, wait
        self._options, self._hook = options, hook
        self._is_empty = False  # a replacement that has nothing yet
        self._committed: tuple[int, tuple[float, ...]] = (0, ())
        self._tries = (0, 0)  # the step, and the number of recoveries at it
        self._links: tuple[bool, ...] = ()  # for every group, whether the device has connections that could resume
        self._resumed = -1  # the step at which they last resumed
        self._own: OwnFault | None = None  # this rank's own, until a plan accounts for it
        self._damaged_from: list[int] = []  # the source of each damaged transfer in this recovery
        self._job = generations.job()
        # Of the recovery under way:
        self._is_replacement, self._left = False, 0  # `_left`: the generation in which this rank last trained
        self._hook_failures, self._hook_said = 0, ""
        self._moves: list[Transferred] = []
        self.planned_step = -1

    @property
    def generation(self) -> int:
        """The generation that this rank is in."""
        return self._generations.current

    def committed(self, step: int, vector: tuple[float, ...]) -> None:
        """Remember the newest commit that this rank saw succeed: the one that leads to ``step``."""
        self._committed = (step, vector)

    def recover(
        self,
        state: Recoverable,
        host: HostState,
        is_replacement: bool,
        own: OwnFault | None = None,
    ) -> Outcome:
        """Bring this rank, together with all others, to one step.

        Args:
            state: The sharded state. On a replacement its contents do not matter.
            host: The rest of the state.
            is_replacement: Whether this rank is a replacement.
            own: The rank's own fault that stopped it; None if other ranks stopped it.

        Raises:
            RecoveryError: If the run cannot continue.
            DeviceLostError: If this process cannot continue; the other ranks can recover without it.
        """
        timeline, self._left = Timeline(), self.generation - is_replacement
        self._is_empty = self._is_replacement = is_replacement
        self._own, self._damaged_from = own, []
        self._hook_failures, self._hook_said, self._moves = 0, "", []
        fault = None if is_replacement else self._fault(state, own)
        while True:
            try:
                plan = self._attempt(state, host, fault, timeline)
                self._left = self.generation
                return Outcome(plan, self.generation, timeline, tuple(self._moves))
            except HookError as error:
                # In every phase, the other ranks must return to the start too.
                self._hook_failures, self._hook_said, fault = self._hook_failures + 1, str(error), None
                self._generations.begin_next(self.generation, self._fault(state, OwnFault("exception", str(error))))
            except RecoveryError as final:
                raise RecoveryError(f"{final}{self._standing(state)}") from None
            except Exception as error:
                # An error in the middle of a recovery: the next generation begins, unless it is a bug or final.
                self._own = begins_again(error, self._groups.device) or self._own
                log.info("rank %d: recovery starts again: %s", self._rank, error)
                is_reported = self._own is None or self._own.is_exception  # the log has it since the recovery began
                fault = self._fault(state, None if is_reported else self._own, str(error))
                if timeline.elapsed_s > self._options.rendezvous_timeout_s:
                    raise RecoveryError(
                        f"Recovery has not completed within {timeline.elapsed_s:.0f} s: {error}"
                    ) from error

    def _ended(self) -> tuple[int, ...]:
        """Return the ranks that ended the run. The supervisor names them right after it has given the run up."""
        deadline = time.monotonic() + _NAMED_S
        while True:
            newest = self._generations.newest(self.generation)
            end = self._generations.fault(newest) if newest else None
            if end is not None and end.detected == "end":
                return end.ranks
            if self._generations.verdict() is None or time.monotonic() > deadline:
                return ()
            time.sleep(_POLL_S)

    def _standing(self, state: Recoverable) -> str:
        """Return sentences that name the shards of the ranks that ended the run, and who still holds these shards."""
        ranks = self._ended()
        return "".join(
            f" Rank {rank} held shard {self._table.shard_name(self._table.shard_of(rank))} at step {state.step}; "
            f"{_still_hold([peer for peer in self._table.peers(rank) if peer not in ranks])}."
            for rank in ranks
        )

    def _fault(self, state: Recoverable, own: OwnFault | None, seen: str = "a peer is gone") -> Fault:
        if state.corrupted:
            return Fault("corrupted shard", (self._rank,), state.corrupted)
        if own is not None:
            return Fault(own.detected, (self._rank,), f"rank {self._rank}: {own.text}")
        return Fault("peer gone", (), f"rank {self._rank}: {seen}")

    def _attempt(self, state: Recoverable, host: HostState, fault: Fault | None, timeline: Timeline) -> Plan:
        if state.corrupted:  # first of all: the others must learn of it even if this rank is lost
            self._generations.record_corruption(self.generation + 1)
        timeline.enter(Phase.STOP)
        if fault is not None:
            self._generations.begin(self.generation + 1, fault)
        device = self._groups.device
        if not device.is_host:
            self._monitor.wake_now()
        self._call_hook(Phase.STOP)
        timeline.enter(Phase.CLEAN)
        self._groups.leave()
        self._links = clean(device, state, self._generations)
        self._call_hook(Phase.CLEAN)
        timeline.enter(Phase.REGROUP)
        self._generations.move_on()
        self._monitor.moved_to(self.generation)
        concluded = self._conclude(self.report(state, host), host.settings_advice)
        plan, replaced = concluded.plan, concluded.replaced
        self.planned_step = plan.step
        # The plan accounts for it. If another rank raises from here on, that does not count as "every rank raised".
        self._own = None
        if plan.resume:
            self._resumed = plan.step
        self._groups.open(self.generation, self._connect, plan.resume, concluded.held)
        self._call_hook(Phase.REGROUP, replaced)
        timeline.enter(Phase.REPAIR)
        if self._rank in plan.forward:
            state.roll_forward(plan.commit)
        self._committed = (plan.step, plan.commit)
        if not self._is_empty:
            host.restore_groups(plan.kind, plan.step)
        state.roll_back(plan.kind)
        for move in plan.moves:
            self._move(move, plan, state, host)
        self._call_hook(Phase.REPAIR, replaced, plan)
        timeline.enter(Phase.ROLLBACK)
        state.rebuild()
        host.restore(plan.kind, plan.step)
        self._call_hook(Phase.ROLLBACK, replaced, plan)
        timeline.enter(Phase.RESUME)
        # A replacement does not hold the newest private states of all its peers yet: send it theirs, and them its own.
        self._mirrors.keep(plan.kind, plan.step)
        self._mirrors.begin(plan.kind, plan.step, host.private(plan.kind, plan.step))
        self._mirrors.settle()
        self._call_hook(Phase.RESUME, replaced, plan)
        self._groups.hooks_are_through()
        self._count_try(plan.step, concluded.tries)
        timeline.end()
        return plan

    def _call_hook(self, phase: Phase, replaced: tuple[int, ...] = (), plan: Plan | None = None) -> None:
        if self._hook is None:
            return
        newest = self._generations.newest(self.generation)
        context = RecoveryContext(
            phase=phase.value,
            rank=self._rank,
            world_size=self._table.size,
            generation=self.generation,
            is_replacement=self._is_replacement,
            faults=tuple(self._generations.fault(k) for k in range(self._left + 1, newest + 1)),
            replaced=replaced,
        )
        if plan is not None:
            context = replace(context, step=plan.step, kind=plan.kind, forward=plan.forward, moves=plan.moves)
        self._hook(context)

    def report(self, state: Recoverable, host: HostState) -> Report:
        """Return this rank's report."""
        if self._is_empty:
            said = replace(Report.of_nothing(self._rank), hook=self._hook_said, hook_failures=self._hook_failures)
            return replace(said, damaged_from=tuple(self._damaged_from), groups=self._groups.held(), left=self._left)
        committed, vector = self._committed
        if state.commit_vector is not None and state.step + 1 > committed:
            committed, vector = state.step + 1, state.commit_vector
        step, tries = self._tries
        own = self._own
        tails = host.held("tail")
        newest = max(tails) if tails else -1
        return Report(
            rank=self._rank,
            step=state.step,
            intact=state.intact,
            entered=state.entered,
            committed=committed,
            commit=vector,
            batch=host.held("batch"),
            tail=host.held("tail"),
            mirrors=self._mirrors.held(),
            tries=tries if step == state.step else 0,
            raised=own.text if own is not None and own.is_exception else "",
            damaged_from=tuple(self._damaged_from),
            is_replacement=self._is_replacement,
            hook=self._hook_said,
            hook_failures=self._hook_failures,
            corrupted=state.corrupted,
            device="" if own is None or own.is_exception else own.text,
            left=self._left,
            links=self._links,
            resumed=self._resumed,
            settings=tuple(host.settings(newest).items()) if tails else (),
            settings_step=newest,
            groups=self._groups.held(),
        )

    def _conclude(self, own: Report, advice: str) -> Conclusion:
        """Give this rank's report, and return the conclusion from those of all ranks."""
        generations, generation = self._generations, self.generation

        def draw(parts: list[dict[str, Any]]) -> dict[str, Any]:
            reports = read_reports(parts, generations.has_corruption, generation)
            return conclude(reports, self._table, self._options.max_tries, advice).to_plain()

        ranks, timeout_s = range(self._table.size), self._options.rendezvous_timeout_s
        topic = keys.report(generation)
        return Conclusion.from_plain(
            generations.conclude(topic, self._rank, own.to_plain(), generation, ranks, timeout_s, draw)
        )

    def _move(self, move: Move, plan: Plan, state: Recoverable, host: HostState) -> None:
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
            self._moves.append(Transferred(move.source, move.target, channel.bytes_moved, channel.seconds, move.host))
            log.info(
                "rank %d: got %.1f MB from rank %d in %.3f s, %.0f MB/s",
                self._rank,
                channel.bytes_moved / 1e6,
                move.source,
                channel.seconds,
                channel.bytes_moved / 1e6 / channel.seconds,
            )

    def _doubt(self, source: int, error: TransferError) -> None:
        """Note that data of ``source`` was damaged: the next plan prefers another peer. Give up after ``max_tries``."""
        self._damaged_from.append(source)
        if len(self._damaged_from) >= self._options.max_tries:
            raise RecoveryError(
                f"Rank {self._rank} failed to get its shard {len(self._damaged_from)} times, from ranks"
                f" {', '.join(map(str, self._damaged_from))}: {error}"
            ) from error

    def _give(self, channel: Channel, move: Move, plan: Plan, state: Recoverable, host: HostState) -> None:
        if move.host:
            own = bytes(host.private(plan.kind, plan.step))
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

    def _take(self, channel: Channel, move: Move, plan: Plan, state: Recoverable, host: HostState) -> None:
        if move.host:
            came = channel.receive_plain()
            host.adopt(plan.kind, plan.step, came["replicated"], came["private"])
            self._mirrors.adopt(plan.kind, plan.step, came["peers"])
        state.import_shard(channel.receive_plain(), channel.receive)
        if state.step != plan.step:
            raise TransferError(f"Rank {move.source} sent its shard at step {state.step}, not {plan.step}.")
        self._is_empty = False  # it has all that its peers have; if another rank is lost now, it can send

    def _count_try(self, step: int, tries: int) -> None:
        self._tries = (step, tries + 1)


def _still_hold(ranks: list[int]) -> str:
    """Return the clause that names the ranks which still hold a shard."""
    if not ranks:
        return "no other rank holds it"
    if len(ranks) == 1:
        return f"rank {ranks[0]} still holds it"
    return f"ranks {', '.join(map(str, ranks[:-1]))} and {ranks[-1]} still hold it"
