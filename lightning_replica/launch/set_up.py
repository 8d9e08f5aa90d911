"""Ranks before their first batch: who is stopped, who hangs, and who only takes long.

Nothing can be learnt there of how long anything takes: imports, downloads and the preparation of data may take hours,
on one rank while all others wait for it. So a rank that is past its time-out is looked at for a while longer. If it,
or another that may be what it waits for, uses the machine, that is told, with its stack, and nobody is harmed. If not,
it hangs.
"""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field

from lightning_replica.launch.activity import Activity, state_of
from lightning_replica.launch.beacons import HangLimits


@dataclass(frozen=True)
class Verdict:
    """What a look at the ranks has come to.

    Attributes:
        hanging: Ranks that hang.
        at_work: Ranks that take long and do something; each is told of once in `HangLimits.max_s`.
    """

    hanging: tuple[int, ...] = ()
    at_work: tuple[int, ...] = ()


@dataclass
class SetUp:
    """Looks at ranks before their first batch every now and then.

    Args:
        limits: The user's limits.
    """

    limits: HangLimits
    _stopped: dict[int, float] = field(default_factory=dict)  # since when, by process
    _probes: dict[int, Activity] = field(default_factory=dict)  # by process
    _probed: float = 0.0
    _told: float = float("-inf")

    def stopped(self, processes: Mapping[int, int], now: float) -> tuple[int, ...]:
        """Return the ranks that a signal has stopped for too long, unless all of them are.

        Args:
            processes: Process ids, by rank.
            now: The time.
        """
        found = {rank: process for rank, process in processes.items() if state_of(process) == "T"}
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
            suspects: Those whose time is over.
            busy: Process ids of all ranks that are not known to wait for others, by rank.
            now: The time.
            measure: Tells what a process has used.
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
