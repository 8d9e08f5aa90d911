"""Progress beacons: how the supervisor sees how far every rank is, without a message.

A small block of memory, mapped by the supervisor and all ranks, has a slot for each rank. The rank writes there
whenever it passes one of the points of `lightning_replica.points`: where it is, and until when it should have come to
the next one. That takes about a microsecond, no system call and no message.

The time-out is learnt by the rank: for each place, five times the longest that it has taken there, between the limits
that the user sets. What it spent waiting for others does not count, and while it waits it says so every 20 ms: a rank
that waits is never the one that hangs, unless it stops saying so.
"""

import math
import mmap
import os
import threading
import time
from dataclasses import dataclass, fields
from typing import Final, get_args

from lightning_replica.points import PHASES, Point, Stretch
from lightning_replica.recovery.options import RecoveryOptions

VARIABLE: Final = "LIGHTNING_REPLICA_BEACONS"
_CELLS = 16  # of 8 bytes: two cache lines, so that ranks do not disturb each other
_FIRST = 3  # so often a place has to be passed before its time-out is learnt: compilation, first batches
_FACTOR = 5.0
_START: Final = "start"  # of a process, up to its first batch or its first recovery
_RECOVERY: Final = (_START, *PHASES)
PLACES: Final = (_START, *get_args(Point), *get_args(Stretch))
_NUMBERS: Final = {place: number for number, place in enumerate(PLACES)}


@dataclass(frozen=True)
class HangLimits:
    """How long a rank may go without progress.

    Attributes:
        min_s: The least that a learnt time-out can be.
        max_s: The most; also what holds where nothing has been learnt yet.
        recovery_s: Holds in a recovery, and for a new process until it takes part in one.
    """

    min_s: float = 60.0
    max_s: float = 1800.0
    recovery_s: float = 300.0

    @classmethod
    def of(cls, options: RecoveryOptions) -> "HangLimits":
        """The user's choice. A replacement that hangs is given up before the others give up waiting for it."""
        least, most = options.hang_min_s, options.hang_max_s
        return cls(least, most, min(most, max(least, 0.8 * options.rendezvous_timeout_s)))

    @property
    def off(self) -> bool:
        """Whether nothing is ever a hang."""
        return math.isinf(self.min_s)


@dataclass(frozen=True)
class Slot:
    """What a rank has written last. Times are readings of CLOCK_MONOTONIC, which all processes share, in s.

    Attributes:
        count: Beacons so far.
        place: Where the rank is, an index into `PLACES`.
        waiting: Whether it waits for others there.
        since: When it came there, or began to wait.
        written: When it last wrote.
        deadline: By when it should have written again.
        process: Its process id; 0 until it has one.
        stacks: Its file descriptor that stacks are written to.
        thread: Identity of its main thread.
        step: Updates that are applied; -1 before its first batch.
    """

    count: int = 0
    place: int = 0
    waiting: bool = False
    since: float = 0.0
    written: float = 0.0
    deadline: float = math.inf
    process: int = 0
    stacks: int = -1
    thread: int = 0
    step: int = -1


_COUNT, _PLACE, _WAITING, _SINCE, _WRITTEN, _DEADLINE, _PROCESS, _STACKS, _THREAD, _STEP = range(len(fields(Slot)))


class Beacons:
    """The block of slots, as one process has it mapped.

    Args:
        file: Its descriptor; the mapping outlives it.
    """

    def __init__(self, file: int) -> None:
        self._cells = memoryview(mmap.mmap(file, 0)).cast("d")

    def slot(self, rank: int) -> Slot:
        """What ``rank`` has written last."""
        c = self._of(rank)
        return Slot(
            int(c[_COUNT]),
            int(c[_PLACE]),
            bool(c[_WAITING]),
            c[_SINCE],
            c[_WRITTEN],
            c[_DEADLINE],
            int(c[_PROCESS]),
            int(c[_STACKS]),
            int(c[_THREAD]),
            int(c[_STEP]),
        )

    def reset(self, rank: int, now: float, deadline: float) -> None:
        """A new process begins as ``rank``; it should have written by ``deadline``."""
        cells, fresh = self._of(rank), Slot(since=now, written=now, deadline=deadline)
        for number, field in enumerate(fields(Slot)):
            cells[number] = float(getattr(fresh, field.name))

    def _of(self, rank: int) -> "memoryview[float]":
        return self._cells[rank * _CELLS : (rank + 1) * _CELLS]


def create(world_size: int) -> tuple[Beacons, str] | None:
    """The supervisor's block, and the path under which its children find it; None where there is no such memory.

    Not a file in a directory: nothing is left behind by a supervisor that is killed, and no write waits for a disk.
    """
    if not hasattr(os, "memfd_create"):
        return None
    file = os.memfd_create("lightning_replica_beacons")
    os.ftruncate(file, world_size * _CELLS * 8)
    beacons = Beacons(file)
    return beacons, f"/proc/{os.getpid()}/fd/{file}"


def sign_in(path: str, rank: int, stacks: int) -> None:
    """Write where this process's stacks are found, as soon as it runs; its progress comes later (`Beacon`).

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
    """How long a rank may be at one place.

    Args:
        least_s: The least.
        most_s: The most.
        first_s: Holds until the place has been passed three times.
    """

    def __init__(self, least_s: float, most_s: float, first_s: float) -> None:
        self._least_s, self._most_s = least_s, most_s
        self._longest_s, self._passed = 0.0, 0
        self.limit_s = first_s

    def saw(self, busy_s: float, passed: bool) -> None:
        """The rank was busy at the place for ``busy_s``; ``passed`` if it left it then, else it began to wait."""
        self._passed += passed
        longer = busy_s > self._longest_s
        if longer:
            self._longest_s = busy_s
        if self._passed >= _FIRST and (longer or self._passed == _FIRST):
            self.limit_s = min(max(_FACTOR * self._longest_s, self._least_s), self._most_s)


class Beacon:
    """A rank's own slot: a `points.Watcher` that writes, and learns the time-outs.

    Args:
        path: Where the block is found.
        rank: This rank.
        limits: The user's limits.
        stacks: The file descriptor that stacks are written to.
        replaces: Whether others wait for this process to take a lost rank's place.

    Raises:
        OSError: If the block cannot be mapped.
    """

    def __init__(self, path: str, rank: int, limits: HangLimits, stacks: int, replaces: bool = False) -> None:
        self._cells = _map(path, rank)
        self._least_s = limits.min_s
        quick = _RECOVERY if replaces else PHASES
        self._learnt = [
            Learnt(limits.min_s, limits.max_s, limits.recovery_s if place in quick else limits.max_s)
            for place in PLACES
        ]
        self._here = self._learnt[0]
        self._waiting, self._count, self._since = False, 0, time.monotonic()
        _sign(self._cells, stacks)

    def begins(self, place: Point | Stretch) -> None:
        """Writes that this rank is at ``place`` now."""
        now, number = time.monotonic(), _NUMBERS[place]
        self._here.saw(0.0 if self._waiting else now - self._since, passed=True)
        self._here = self._learnt[number]
        self._cells[_PLACE] = number
        self._go(now)

    def at_step(self, step: int) -> None:
        """Write that ``step`` updates are applied."""
        self._cells[_STEP] = step

    def waits(self) -> None:
        """Writes that this rank waits for others, and lives."""
        now = time.monotonic()
        if not self._waiting:
            self._here.saw(now - self._since, passed=False)
            self._waiting = True
            self._count += 1
            self._cells[_COUNT], self._cells[_SINCE] = self._count, now
        self._cells[_DEADLINE] = now + self._least_s
        self._cells[_WRITTEN] = now
        self._cells[_WAITING] = 1

    def goes_on(self) -> None:
        """Writes that it goes on."""
        if self._waiting:
            self._go(time.monotonic())

    def _go(self, now: float) -> None:
        cells = self._cells
        self._waiting, self._since = False, now
        self._count += 1
        cells[_DEADLINE] = now + self._here.limit_s
        cells[_COUNT] = self._count
        cells[_SINCE] = cells[_WRITTEN] = now
        cells[_WAITING] = 0
