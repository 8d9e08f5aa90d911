"""Watches the progress of ranks for the supervisor: finds hangs, says which rank and where, writes the stacks."""

import os
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from datetime import datetime
from pathlib import Path
from typing import Final, Protocol

from lightning_replica.control.phase import Phase
from lightning_replica.core.points import PHASES
from lightning_replica.launch import stacks
from lightning_replica.launch.beacons import POSITIONS, VARIABLE, HangLimits, Slot, create
from lightning_replica.launch.hangs import Judge
from lightning_replica.launch.set_up import SetUp
from lightning_replica.launch.stacks import Finding, Stack

DIRECTORY: Final = "replica_stacks"
INSTEAD: Final = "LIGHTNING_REPLICA_STACKS"  # environment variable: where that directory is, whatever the script says
_WHERE: Final[dict[str, str]] = {
    "start": "at the start, before its first batch",
    "batch_start": "while loading a batch",
    "forward": "in forward",
    "backward": "in backward",
    "reduction": "in the reduction",
    "before_commit": "in the commit",
    "after_commit": "in the update",
    "update": "in the update",
    "gather": "in the gather",
    "batch_end": "at the end of a batch",
    **{phase: f"in recovery ({phase})" for phase in PHASES},
    **dict.fromkeys(("checkpoint", "save", "publish"), "while saving a checkpoint"),
    **dict.fromkeys(("gasp", "gasp_write", "track"), "while saving the last checkpoint"),
    "epoch_start": "at the start of an epoch",
    "epoch_end": "at the end of an epoch",
    "validation_start": "at the start of a validation",
    "validation": "in validation",
    "validation_batch_end": "in validation",
    "validation_end": "at the end of a validation",
    "fit_end": "at the end of `fit`",
}


_STOPPED: Final = "a signal has stopped it"
_RETRY: Final = "; all ranks are called back to try again."
_NO_RETRY: Final = ". Outside of training, nobody can call them back: the time-out of the collective ends this."


class Watched(Protocol):
    """A rank's process."""

    @property
    def pid(self) -> int:
        """Its process id."""

    def send_signal(self, signum: int) -> None:
        """Send a signal, unless the process has ended."""


@dataclass(frozen=True)
class Hang:
    """A hang that a look has found.

    Attributes:
        culprits: For each rank that hangs, one line about it.
        text: The message for the user.
        stalled: Whether all ranks wait for each other. If not, and there are no culprits, only the text matters.
    """

    culprits: dict[int, str]
    text: str
    stalled: bool = False


class Watch:
    """Looks at the beacons of all ranks, and at their stacks where beacons say too little.

    Args:
        world_size: Number of ranks.
        limits: The user's limits.
        directory: Where stacks are written, in a folder of their own; the environment may name another place.

    Attributes:
        stalls: Whether all ranks of this node wait for others for too long in training, as last seen.
    """

    def __init__(self, world_size: int, limits: HangLimits, directory: Path) -> None:
        self._findings: dict[int, tuple[float, Finding]] = {}  # by rank: when it had last written, and what it is doing
        self._whole, self._on_node = True, ""
        self._told: dict[int, float] = {}  # by rank: since when it waited in the last stall after training
        self.stalls = False
        created = create(world_size)
        self._beacons = created[0] if created else None
        self._path = created[1] if created else ""
        self.use(limits, directory)

    def use(self, limits: HangLimits, directory: Path) -> None:
        """Use other limits and another directory from now on."""
        self._limits, self._directory = limits, Path(os.environ.get(INSTEAD) or directory)
        self.interval_s = min(max(0.25 * limits.min_s, 0.05), 1.0)
        self._judge = Judge(limits, self.interval_s)
        self._set_up = SetUp(limits)

    def stands(self, on_node: str) -> None:
        """Say in messages on which node ranks are. See `NodeContext.on_node`."""
        self._on_node = on_node

    @property
    def variables(self) -> dict[str, str]:
        """The variables that a rank's environment needs."""
        return {VARIABLE: self._path} if self._path else {}

    def started(self, rank: int, replaces: bool) -> None:
        """Reset the beacon of ``rank`` for a new process."""
        if self._beacons is not None:
            now = time.monotonic()
            limit_s = self._limits.recovery_s if replaces else self._limits.max_s
            self._beacons.reset(rank, now, now + limit_s)

    def look(self, processes: Mapping[int, Watched], phase: Callable[[], Phase], whole: bool = True) -> Hang | None:
        """Look at all ranks once, and return the hang that was found, if any.

        Args:
            processes: The processes of all live ranks of this node.
            phase: Returns where the run is; called only if something looks like a hang.
            whole: Whether no other node has ranks. Else ranks that all wait may wait for a rank of another node.
        """
        self._whole = whole
        if self._beacons is None or self._limits.off:
            return None
        self._judge.looks(time.monotonic())
        hang = self._look({rank: self._slot(rank, processes[rank]) for rank in sorted(processes)}, processes, phase)
        self._judge.looked(time.monotonic())
        return hang

    def _look(
        self, slots: dict[int, Slot], processes: Mapping[int, Watched], phase: Callable[[], Phase]
    ) -> Hang | None:
        now = time.monotonic()
        stopped = self._stopped(slots, now)
        overdue = self._judge.overdue(slots, now)
        self.stalls = False
        if not stopped and not overdue and not self._judge.stalled(slots, {}, now):
            return None
        current = phase()
        stopped = tuple(
            rank for rank in stopped if current == "set-up" or (current == "fit" and _at_start(slots[rank]))
        )
        if stopped:
            return self._describe(slots, stopped, self._ask(slots, processes), dict.fromkeys(stopped, _STOPPED))
        if not overdue and current == "set-up":
            return None
        findings = self._find({rank: slots[rank] for rank in overdue}, processes)
        if current == "done":
            return self._look_after_training(slots, processes, findings)
        culprits = self._judge.culprits(slots, findings, now)
        if current == "set-up":
            return self._look_at_set_up(slots, processes, findings, culprits)
        self.stalls = not culprits and self._judge.stalled(slots, findings, now)
        stalled = self._whole and self.stalls
        if not culprits and not stalled:
            return None
        asked = self._ask(slots, processes)
        if any(self._slot(rank, processes[rank]).written != slots[rank].written for rank in (culprits or findings)):
            return None  # it makes progress after all
        if stalled:
            self._judge.retried({rank: self._slot(rank, processes[rank]) for rank in slots}, time.monotonic())
            return self._describe_stall(slots, asked)
        return self._describe(slots, culprits, asked)

    def _look_after_training(
        self, slots: Mapping[int, Slot], processes: Mapping[int, Watched], findings: Mapping[int, Finding]
    ) -> Hang | None:
        """Return a stall once. No rank is ended: none could be replaced."""
        since = {rank: slot.since for rank, slot in slots.items()}
        if since == self._told or not self._whole or not self._judge.stalled(slots, findings, time.monotonic()):
            return None
        self._told = since
        return self._describe_stall(slots, self._ask(slots, processes), in_training=False)

    def called_back(self, processes: Mapping[int, Watched]) -> str:
        """Note that all ranks of the run, also on other nodes, were called back from their waits.

        Returns:
            What ranks of this node were doing, in words.
        """
        slots = {rank: self._slot(rank, processes[rank]) for rank in sorted(processes)}
        if not slots or self._limits.off:
            return ""
        hang = self._describe_stall(slots, self._ask(slots, processes))
        self._judge.retried({rank: self._slot(rank, processes[rank]) for rank in slots}, time.monotonic())
        return hang.text

    def _stopped(self, slots: Mapping[int, Slot], now: float) -> tuple[int, ...]:
        """Return the ranks that a signal has stopped. This does not wait for their time-out."""
        return self._set_up.stopped({rank: slot.process for rank, slot in slots.items()}, now)

    def _look_at_set_up(
        self,
        slots: dict[int, Slot],
        processes: Mapping[int, Watched],
        findings: Mapping[int, Finding],
        culprits: tuple[int, ...],
    ) -> Hang | None:
        busy = {r: slot.process for r, slot in slots.items() if not self._judge.waits(r, slot, findings)}
        verdict = self._set_up.judge(culprits, busy, time.monotonic())
        if verdict.hanging:
            return self._describe(slots, verdict.hanging, self._ask(slots, processes))
        if not verdict.at_work:
            return None
        now, asked = time.monotonic(), self._ask(slots, processes)
        stack = "\n".join(
            f"Rank {rank} has not reached its first batch for {now - slots[rank].since:.0f} s, but is at work."
            f" Its stack, innermost first:\n{asked[rank].describe()}"
            for rank in verdict.at_work
        )
        return Hang({}, f"{stack}\nNo rank is ended for this. Raise hang_max_s to see this message later.")

    def slot(self, rank: int) -> Slot | None:
        """Return what a rank's process has last written, even if it has ended; None if ranks are not watched."""
        return None if self._beacons is None or self._limits.off else self._beacons.slot(rank)

    def where(self, rank: int) -> str:
        """Return where the rank was then, in words for the user."""
        slot = self.slot(rank)
        return "" if slot is None else _where(slot) + (f" of step {slot.step}" if slot.step >= 0 else "")

    def _slot(self, rank: int, process: Watched) -> Slot:
        if self._beacons is None:
            raise RuntimeError("there is no block of beacons")
        slot = self._beacons.slot(rank)
        return slot if slot.process else replace(slot, process=process.pid)  # it still imports

    def _find(self, slots: Mapping[int, Slot], processes: Mapping[int, Watched]) -> dict[int, Finding]:
        """Return what overdue ranks are doing. A rank is asked once for each time that it has stopped writing."""
        new = {rank: slot for rank, slot in slots.items() if self._findings.get(rank, (None,))[0] != slot.written}
        for rank, stack in (self._ask(new, processes) if new else {}).items():
            self._findings[rank] = (new[rank].written, stack.finding)
        return {rank: _what_it_does(slot, self._findings[rank][1]) for rank, slot in slots.items()}

    def _ask(self, slots: Mapping[int, Slot], processes: Mapping[int, Watched]) -> dict[int, Stack]:
        return stacks.collect(slots, lambda rank: processes[rank].send_signal(stacks.SIGNAL))

    def _describe_stall(self, slots: Mapping[int, Slot], asked: Mapping[int, Stack], in_training: bool = True) -> Hang:
        now = time.monotonic()
        where = self._save(asked, {rank: _title(rank, slot, now) for rank, slot in slots.items()}, ())
        first = min(slots, key=lambda rank: slots[rank].since)
        idle_s = now - max(slot.since for slot in slots.values())
        whom = "others" if self._on_node else "each other"
        lines = "".join(f"{title}:\n{users}\n" for title, users in _lines_of_users(slots, asked).items())
        text = (
            f"All ranks{self._on_node} wait for {whom}, and nothing has moved for {idle_s:.1f} s (rank {first}"
            f" waits longest, {_where(slots[first])}): a message was lost, or one rank has skipped a collective that"
            f" the others called{_RETRY if in_training else _NO_RETRY}\n{lines}{where}"
        )
        return Hang({}, text, stalled=in_training)

    def _describe(
        self,
        slots: Mapping[int, Slot],
        culprits: tuple[int, ...],
        asked: Mapping[int, Stack],
        how: Mapping[int, str] | None = None,
    ) -> Hang:
        now = time.monotonic()
        titles = {rank: _title(rank, slot, now) for rank, slot in slots.items()}
        where = self._save(asked, titles, culprits)
        lines = {rank: _line(rank, self._on_node, slots[rank], now, (how or {}).get(rank)) for rank in culprits}
        own = "".join(f"{lines[rank]}. Its stack, innermost first:\n{asked[rank].describe()}\n" for rank in culprits)
        return Hang({rank: f"{line} and was killed" for rank, line in lines.items()}, f"{own}{where}")

    def _save(self, asked: Mapping[int, Stack], titles: Mapping[int, str], culprits: tuple[int, ...]) -> str:
        name = "-".join([f"{datetime.now():%Y%m%d-%H%M%S}", *(f"rank{rank}" for rank in culprits)])
        directory = self._directory / DIRECTORY / name
        try:
            stacks.save(asked, titles, directory)
        except OSError as error:
            return f"The stacks of all ranks could not be written: {error}."
        return f"The stacks of all ranks are in {directory}."


def _where(slot: Slot) -> str:
    return _WHERE[POSITIONS[slot.position]]


def _lines_of_users(slots: Mapping[int, Slot], asked: Mapping[int, Stack]) -> dict[str, str]:
    """Return where in the user's code ranks are, with a title for ranks that are at the same place."""
    ranks: dict[tuple[str, str], list[int]] = {}
    for rank, slot in slots.items():
        ranks.setdefault((_where(slot), asked[rank].users), []).append(rank)
    return {
        f"Rank{'s' if len(same) > 1 else ''} {', '.join(map(str, same))}, {where}": users
        for (where, users), same in ranks.items()
        if users
    }


def _at_start(slot: Slot) -> bool:
    """Return whether a rank has not come to its first batch or its first recovery."""
    return not slot.position


def _line(rank: int, on_node: str, slot: Slot, now: float, how: str | None = None) -> str:
    if how is not None:
        return f"Rank {rank}{on_node} hangs {_where(slot)} ({how})"
    idle_s, limit_s = now - slot.written, slot.deadline - slot.written
    return (
        f"Rank {rank}{on_node} hangs {_where(slot)} (no progress for {idle_s:.1f} s, its time-out is {limit_s:.1f} s)"
    )


def _title(rank: int, slot: Slot, now: float) -> str:
    what = ", waits for others" if slot.waiting else ""
    return f"rank {rank}, process {slot.process}: {_where(slot)} for {now - slot.since:.1f} s{what}"


def _what_it_does(slot: Slot, finding: Finding) -> Finding:
    """Return what a rank is doing, from its stack and what its device does."""
    return "collective" if finding == "busy" and slot.device_waits else finding
