"""Ranks before their first batch: which are stopped, which hang, and which only take long.

Before its first batch, a rank cannot learn how long anything takes: imports, downloads and the preparation of data may
take hours on one rank, while all others wait for it. So a rank that is past its time-out is observed for a while
longer. If that rank, or another rank that it may wait for, uses the machine, the supervisor tells the user so, with the
stack, and ends no rank. If not, the rank hangs.
"""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field

import psutil

from lightning_replica.core.machine import status_of
from lightning_replica.launch.activity import Activity
from lightning_replica.launch.beacons import HangLimits


@dataclass(frozen=True)
class Verdict:
    """The result of a look at the ranks.

    Attributes:
        hanging: Ranks that hang.
        at_work: Ranks that take long but are at work. After such a verdict, no rank is judged for `HangLimits.max_s`.
    """

    hanging: tuple[int, ...] = ()
    at_work: tuple[int, ...] = ()


@dataclass
class SetUp:
    """Judges ranks before their first batch, at each look of the supervisor.

    Args:
        limits: The user's limits for hangs.
    """

    limits: HangLimits
    _stopped: dict[int, float] = field(default_factory=dict)  # when each was first seen stopped, by process
    _probes: dict[int, Activity] = field(default_factory=dict)  # by process
    _probed: float = 0.0
    _told: float = float("-inf")

    def stopped(self, processes: Mapping[int, int], now: float) -> tuple[int, ...]:
        """Return the ranks that a signal has stopped for too long, unless all ranks are stopped.

        Args:
            processes: Process ids, by rank.
            now: The time.
        """
        found = {rank: process for rank, process in processes.items() if status_of(process) == psutil.STATUS_STOPPED}
        self._stopped = {process: self._stopped.get(process, now) for process in found.values()}
        if len(found) == len(processes):
            return ()
        return tuple(rank for rank, process in found.items() if now - self._stopped[process] > self.limits.min_s)

    def judge(
        self,
        suspects: Iterable[int],
        busy: Mapping[int, int],
        now: float,
        measure: Callable[[int], Activity] = Activity.of,
    ) -> Verdict:
        """Judge ranks that have not come to their first batch in time.

        Args:
            suspects: The ranks that are past their time-out.
            busy: Process ids of all ranks that are not known to wait for others, by rank.
            now: The time.
            measure: Returns what a process has used.
        """
        hanging = tuple(suspects)
        if not hanging or now - self._told < self.limits.max_s:
            self._probes = {}
            return Verdict()
        if not self._probes.keys() >= set(busy.values()):
            self._probes, self._probed = {process: measure(process) for process in busy.values()}, now
        seconds = now - self._probed
        if seconds < self.limits.min_s:
            return Verdict()
        before, self._probes = self._probes, {}
        at_work = [r for r, process in busy.items() if measure(process).is_work_since(before[process], seconds)]
        if not at_work:
            return Verdict(hanging=hanging)
        self._told = now
        return Verdict(at_work=tuple(at_work))
