"""The supervisor's eye on the progress of its ranks: notices a hang, says whose and where, writes the stacks."""

import os
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Final

from lightning_replica.launch import stacks
from lightning_replica.launch.beacons import PLACES, VARIABLE, HangLimits, Slot, create
from lightning_replica.launch.hangs import Judge
from lightning_replica.launch.stacks import Finding, Stack
from lightning_replica.points import PHASES

DIRECTORY: Final = "replica_stacks"
INSTEAD: Final = "LIGHTNING_REPLICA_STACKS"  # environment: where that directory is made, whatever the script says
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


@dataclass(frozen=True)
class Hang:
    """What was found.

    Attributes:
        culprits: For each rank that hangs, one line about it; empty if all ranks wait for each other.
        text: What to tell the user.
    """

    culprits: dict[int, str]
    text: str


class Watch:
    """Looks at the beacons of all ranks, and at their stacks where there are too few.

    Args:
        world_size: Number of ranks.
        limits: The user's limits.
        directory: Where stacks are written to, in a folder of their own; the environment may name another place.
    """

    def __init__(self, world_size: int, limits: HangLimits, directory: Path) -> None:
        self._limits, self._directory = limits, Path(os.environ.get(INSTEAD) or directory)
        self.interval_s = min(max(0.25 * limits.min_s, 0.05), 1.0)
        self._judge = Judge(limits, self.interval_s)
        self._findings: dict[int, tuple[float, Finding]] = {}  # by rank: when it had written last, what it is at
        created = None if limits.off else create(world_size)
        self._beacons = created[0] if created else None
        self._path = created[1] if created else ""

    @property
    def variables(self) -> dict[str, str]:
        """What a rank's environment needs."""
        return {VARIABLE: self._path} if self._path else {}

    def born(self, rank: int, replaces: bool) -> None:
        """A new process begins as ``rank``."""
        if self._beacons is not None:
            now = time.monotonic()
            self._beacons.reset(rank, now, now + self._limits.recovery_s if replaces else float("inf"))

    def look(self, send: Mapping[int, Callable[[int], None]], in_fit: Callable[[], bool]) -> Hang | None:
        """Looks once.

        Args:
            send: For every live rank, what sends it a signal.
            in_fit: Whether a rank can be replaced now; asked only where something looks like a hang.
        """
        if self._beacons is None:
            return None
        self._judge.looks(time.monotonic())
        hang = self._look({rank: self._beacons.slot(rank) for rank in sorted(send)}, send, in_fit)
        self._judge.looked(time.monotonic())
        return hang

    def _look(
        self, slots: dict[int, Slot], send: Mapping[int, Callable[[int], None]], in_fit: Callable[[], bool]
    ) -> Hang | None:
        now = time.monotonic()
        overdue = self._judge.overdue(slots, now)
        if not overdue and not self._judge.stalled(slots, {}, now) or not in_fit():
            return None
        findings = self._find({rank: slots[rank] for rank in overdue}, send)
        culprits = self._judge.culprits(slots, findings, now)
        stalled = not culprits and self._judge.stalled(slots, findings, now)
        if not culprits and not stalled:
            return None
        asked = self._ask(slots, send)
        if any(self._slot(rank).written != slots[rank].written for rank in (culprits or findings)):
            return None  # it goes on after all
        if stalled:
            self._judge.retried({rank: self._slot(rank) for rank in slots}, time.monotonic())
        return self._describe(slots, culprits, asked)

    def _slot(self, rank: int) -> Slot:
        if self._beacons is None:
            raise RuntimeError("there is no block of beacons")
        return self._beacons.slot(rank)

    def _find(self, slots: Mapping[int, Slot], send: Mapping[int, Callable[[int], None]]) -> dict[int, Finding]:
        """What overdue ranks are at; asked once for each time that they have stopped."""
        new = {rank: slot for rank, slot in slots.items() if self._findings.get(rank, (None,))[0] != slot.written}
        for rank, stack in (self._ask(new, send) if new else {}).items():
            self._findings[rank] = (new[rank].written, stack.finding)
        return {rank: self._findings[rank][1] for rank in slots}

    def _ask(self, slots: Mapping[int, Slot], send: Mapping[int, Callable[[int], None]]) -> dict[int, Stack]:
        return stacks.collect(slots, lambda rank: send[rank](stacks.SIGNAL))

    def _describe(self, slots: Mapping[int, Slot], culprits: tuple[int, ...], asked: Mapping[int, Stack]) -> Hang:
        now = time.monotonic()
        titles = {rank: _title(rank, slot, now) for rank, slot in slots.items()}
        where = self._save(asked, titles, culprits)
        if not culprits:
            first = min(slots, key=lambda rank: slots[rank].since)
            idle_s = now - max(slot.since for slot in slots.values())
            text = (
                f"All ranks wait for each other, and nothing has moved for {idle_s:.1f} s (rank {first} waits longest,"
                f" {_where(slots[first])}): a message was lost, or one rank has left out a collective of the others"
            )
            return Hang({}, f"{text}; all are called back to try again. {where}")
        lines = {rank: _line(rank, slots[rank], now) for rank in culprits}
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
    return _WHERE[PLACES[slot.place]]


def _line(rank: int, slot: Slot, now: float) -> str:
    idle_s, limit_s = now - slot.written, slot.deadline - slot.written
    return f"Rank {rank} hangs {_where(slot)} (no progress for {idle_s:.1f} s, its time-out is {limit_s:.1f} s)"


def _title(rank: int, slot: Slot, now: float) -> str:
    what = ", waits for others" if slot.waiting else ""
    return f"rank {rank}, process {slot.process}: {_where(slot)} for {now - slot.since:.1f} s{what}"
