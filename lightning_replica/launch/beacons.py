"""Progress beacons: how the supervisor sees the progress of every rank, without a message.

A small block of memory, mapped by the supervisor and all ranks, has a slot for each rank. The rank writes to its slot
whenever it passes one of the points of `lightning_replica.core.points`: where it is, and by when it should reach the
next point. That takes about a microsecond, no system call and no message.

The rank learns its time-outs: for each position, five times the longest time that it has taken there, between the
limits that the user sets. Time that it spends waiting for others does not count. While it waits, it writes so every
20 ms: a waiting rank is never the one that hangs, unless it stops writing.
"""

import math
import mmap
import os
import threading
import time
from dataclasses import dataclass, fields
from typing import Final, get_args

from lightning_replica.core.options import RecoveryOptions
from lightning_replica.core.points import PHASES, Point, Stretch

VARIABLE: Final = "LIGHTNING_REPLICA_BEACONS"
_CELLS = 16  # of 8 bytes: two cache lines, so that ranks do not disturb each other
_FIRST = 3  # a position must be passed this often before its time-out is learnt: compilation, first batches
_FACTOR = 5.0
_START: Final = "start"  # of a process, up to its first batch or its first recovery
_RECOVERY: Final = (_START, *PHASES)
POSITIONS: Final = (_START, *get_args(Point), *get_args(Stretch))
_NUMBERS: Final = {position: number for number, position in enumerate(POSITIONS)}


@dataclass(frozen=True)
class HangLimits:
    """How long a rank may go without progress.

    Attributes:
        min_s: The shortest possible learnt time-out.
        max_s: The longest time-out, which also holds where nothing has been learnt yet.
        recovery_s: The time-out in a recovery, and for a replacement until it takes part in one.
    """

    min_s: float = 60.0
    max_s: float = 1800.0
    recovery_s: float = 300.0

    @classmethod
    def of(cls, options: RecoveryOptions) -> "HangLimits":
        """Return the user's limits. A replacement that hangs is given up before other ranks give up waiting for it."""
        least, most = options.hang_min_s, options.hang_max_s
        return cls(least, most, min(most, max(least, 0.8 * options.rendezvous_timeout_s)))

    @property
    def off(self) -> bool:
        """Whether nothing ever counts as a hang."""
        return math.isinf(self.min_s)


@dataclass(frozen=True)
class Slot:
    """What a rank has last written. Times are readings of CLOCK_MONOTONIC, which all processes share, in s.

    Attributes:
        count: Number of beacons so far.
        position: Where the rank is, an index into `POSITIONS`.
        waiting: Whether the rank waits for others there.
        since: When the rank came there, or began to wait.
        written: When the rank last wrote.
        deadline: By when the rank should have written again.
        process: The rank's process id; 0 until the process has written it.
        stacks: The process's file descriptor that stacks are written to.
        thread: Identity of the process's main thread.
        step: Number of applied updates; -1 before the first batch.
        device_waits: Whether the rank's device is in a collective that has not ended for a while. The rank may then
            be blocked wherever it hands work to the device.
    """

    count: int = 0
    position: int = 0
    waiting: bool = False
    since: float = 0.0
    written: float = 0.0
    deadline: float = math.inf
    process: int = 0
    stacks: int = -1
    thread: int = 0
    step: int = -1
    device_waits: bool = False


_COUNT, _POSITION, _WAITING, _SINCE, _WRITTEN, _DEADLINE, _PROCESS, _STACKS, _THREAD, _STEP, _DEVICE = range(
    len(fields(Slot))
)


class Beacons:
    """The block of slots, as one process has mapped it.

    Args:
        file: Descriptor of the block; the mapping outlives it.
    """

    def __init__(self, file: int) -> None:
        self._cells = memoryview(mmap.mmap(file, 0)).cast("d")

    def slot(self, rank: int) -> Slot:
        """Return what ``rank`` has last written."""
        c = self._of(rank)
        return Slot(
            int(c[_COUNT]),
            int(c[_POSITION]),
            bool(c[_WAITING]),
            c[_SINCE],
            c[_WRITTEN],
            c[_DEADLINE],
            int(c[_PROCESS]),
            int(c[_STACKS]),
            int(c[_THREAD]),
            int(c[_STEP]),
            bool(c[_DEVICE]),
        )

    def reset(self, rank: int, now: float, deadline: float) -> None:
        """Reset the slot of ``rank`` for a new process, which should have written by ``deadline``."""
        cells, fresh = self._of(rank), Slot(since=now, written=now, deadline=deadline)
        for number, field in enumerate(fields(Slot)):
            cells[number] = float(getattr(fresh, field.name))

    def _of(self, rank: int) -> "memoryview[float]":
        return self._cells[rank * _CELLS : (rank + 1) * _CELLS]


def create(world_size: int) -> tuple[Beacons, str] | None:
    """Create the supervisor's block, and return it with its path for children; None where there is no such memory.

    The block is not a file in a directory, so a killed supervisor leaves nothing behind, and no write waits for a disk.
    """
    if not hasattr(os, "memfd_create"):
        return None
    file = os.memfd_create("lightning_replica_beacons")
    os.ftruncate(file, world_size * _CELLS * 8)
    beacons = Beacons(file)
    return beacons, f"/proc/{os.getpid()}/fd/{file}"


def register_stacks(path: str, rank: int, stacks: int) -> None:
    """Write where this process's stacks are found, as soon as it runs. `Beacon` writes its progress later.

    Raises:
        OSError: If the block cannot be mapped.
    """
    _sign(_map(path, rank), stacks)


def _sign(cells: "memoryview[float]", stacks: int) -> None:
    cells[_STACKS], cells[_THREAD] = stacks, threading.main_thread().ident or 0
    cells[_PROCESS] = os.getpid()


def _map(path: str, rank: int) -> "memoryview[float]":
    file = os.open(path, os.O_RDWR | os.O_CLOEXEC)
    try:
        return Beacons(file)._of(rank)
    finally:
        os.close(file)


class Learnt:
    """How long a rank may stay at one position.

    Args:
        least_s: The shortest time-out.
        most_s: The longest time-out.
        first_s: The time-out until the position has been passed three times.
    """

    def __init__(self, least_s: float, most_s: float, first_s: float) -> None:
        self._least_s, self._most_s = least_s, most_s
        self._longest_s, self._passed = 0.0, 0
        self.limit_s = first_s

    def saw(self, busy_s: float, passed: bool) -> None:
        """Record that the rank was busy here for ``busy_s``, and then left (``passed``) or began to wait."""
        self._passed += passed
        longer = busy_s > self._longest_s
        if longer:
            self._longest_s = busy_s
        if self._passed >= _FIRST and (longer or self._passed == _FIRST):
            self.limit_s = min(max(_FACTOR * self._longest_s, self._least_s), self._most_s)


class Beacon:
    """A rank's own slot: a `points.Watcher` that writes to it and learns the time-outs.

    Args:
        path: Path of the block.
        rank: This rank.
        limits: The user's limits.
        stacks: The file descriptor that stacks are written to.
        replaces: Whether other ranks wait for this process to take a lost rank's place.

    Raises:
        OSError: If the block cannot be mapped.
    """

    def __init__(self, path: str, rank: int, limits: HangLimits, stacks: int, replaces: bool = False) -> None:
        self._cells = _map(path, rank)
        self._least_s = limits.min_s
        quick = _RECOVERY if replaces else PHASES
        self._learnt = [
            Learnt(limits.min_s, limits.max_s, limits.recovery_s if position in quick else limits.max_s)
            for position in POSITIONS
        ]
        self._current = self._learnt[0]
        self._waiting, self._count, self._since = False, 0, time.monotonic()
        _sign(self._cells, stacks)

    def begins(self, position: Point | Stretch) -> None:
        """Write that this rank is at ``position`` now."""
        now, number = time.monotonic(), _NUMBERS[position]
        self._current.saw(0.0 if self._waiting else now - self._since, passed=True)
        self._current = self._learnt[number]
        self._cells[_POSITION] = number
        self._go(now)

    def at_step(self, step: int) -> None:
        """Write that ``step`` updates are applied."""
        self._cells[_STEP] = step

    def waits(self) -> None:
        """Write that this rank waits for others, and is alive."""
        now = time.monotonic()
        if not self._waiting:
            self._current.saw(now - self._since, passed=False)
            self._waiting = True
            self._count += 1
            self._cells[_COUNT], self._cells[_SINCE] = self._count, now
        self._cells[_DEADLINE] = now + self._least_s
        self._cells[_WRITTEN] = now
        self._cells[_WAITING] = 1

    def device_waits(self, waits: bool) -> None:
        """Write whether the device is in a collective that has not ended for a while. Called by another thread."""
        self._cells[_DEVICE] = waits

    def goes_on(self) -> None:
        """Write that this rank has stopped waiting."""
        if self._waiting:
            self._go(time.monotonic())

    def _go(self, now: float) -> None:
        cells = self._cells
        self._waiting, self._since = False, now
        self._count += 1
        cells[_DEADLINE] = now + self._current.limit_s
        cells[_COUNT] = self._count
        cells[_SINCE] = cells[_WRITTEN] = now
        cells[_WAITING] = 0
