"""Which rank hangs? Pure code: it finds the ranks at fault from what ranks have written and what their stacks show.

- A rank that is past its deadline is *overdue*. It may still only wait for others, in a blocking collective of user
  code, or be stopped in a debugger. Its stack shows this.
- A rank that is overdue for another reason is at fault as soon as another rank waits, as the others have come further.
  If no rank waits, all are at the same place (for example at a file system that is gone). Then no rank can be singled
  out, and all are left alone until the user's maximum (`HangLimits.max_s`) is over.
- If every rank waits and nothing moves, no rank is at fault: a wake-up was lost. All ranks retry.
"""

from collections.abc import Mapping
from dataclasses import dataclass

from lightning_replica.launch.beacons import HangLimits, Slot
from lightning_replica.launch.stacks import Finding


@dataclass(frozen=True)
class _Gap:
    end: float
    length_s: float


class Judge:
    """Judges the slots at regular intervals.

    Args:
        limits: The user's limits.
        interval_s: Time between two looks, in s.
    """

    def __init__(self, limits: HangLimits, interval_s: float) -> None:
        self._limits, self._interval_s = limits, interval_s
        self._looked: float | None = None
        self._gaps: list[_Gap] = []
        self._retried: dict[int, float] = {}  # by rank: when it had last written as all ranks were called back
        self._retry = 0.0

    def looks(self, now: float) -> None:
        """Record a look at ``now``. If it is late, the machine or everyone's process group slept: blame no rank."""
        if self._looked is not None and now - self._looked > 2 * self._interval_s:
            self._gaps = [*self._gaps, _Gap(now, now - self._looked - self._interval_s)][-16:]
        self._looked = now

    def looked(self, now: float) -> None:
        """Record that the look ended at ``now``; the time that it took does not count as sleep."""
        self._looked = now

    def overdue(self, slots: Mapping[int, Slot], now: float) -> tuple[int, ...]:
        """Return the ranks that should have written again."""
        return tuple(rank for rank, slot in slots.items() if now > slot.deadline + self._slept_since(slot.written))

    def culprits(self, slots: Mapping[int, Slot], findings: Mapping[int, Finding], now: float) -> tuple[int, ...]:
        """Return the ranks that are to be replaced.

        Args:
            slots: The slots of all live ranks.
            findings: What each overdue rank is doing.
            now: The time.
        """
        suspects = tuple(rank for rank, finding in findings.items() if self._suspect(rank, slots[rank], finding, now))
        if any(self.waits(rank, slot, findings) for rank, slot in slots.items() if rank not in suspects):
            return suspects
        if len(suspects) < len(slots):
            return ()  # the others are busy; in the end they wait, or become suspects themselves
        patience_s = self._limits.max_s
        return tuple(r for r in suspects if now - slots[r].since - self._slept_since(slots[r].since) > patience_s)

    def stalled(self, slots: Mapping[int, Slot], findings: Mapping[int, Finding], now: float) -> bool:
        """Return whether all ranks wait for each other, for longer than a rank may go without progress."""
        if not slots or not all(self.waits(rank, slot, findings) for rank, slot in slots.items()):
            return False
        last = max(self._retry, *(slot.since for slot in slots.values()))
        return now - last - self._slept_since(last) > self._limits.min_s

    def retried(self, slots: Mapping[int, Slot], now: float) -> None:
        """Record that all ranks were called back from their waits. A rank that still waits then becomes a suspect."""
        self._retry = now
        self._retried = {rank: slot.written for rank, slot in slots.items()}

    def _suspect(self, rank: int, slot: Slot, finding: Finding, now: float) -> bool:
        if finding == "collective":
            called_back = self._retried.get(rank) == slot.written
            return called_back and now - self._retry - self._slept_since(self._retry) > self._limits.min_s
        return finding != "debugger"

    def waits(self, rank: int, slot: Slot, findings: Mapping[int, Finding]) -> bool:
        """Return whether a rank waits for others."""
        return findings[rank] == "collective" if rank in findings else slot.waiting

    def _slept_since(self, moment: float) -> float:
        return sum(gap.length_s for gap in self._gaps if gap.end > moment)
