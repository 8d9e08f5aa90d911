"""Which rank hangs? Pure: from what ranks have written, and what their stacks say, to who is at fault.

- A rank that is past its deadline is *overdue*. It may still only wait for others, in a blocking collective of the
  user's, or stand in a debugger: its stack tells.
- A rank that is overdue for its own sake is at fault as soon as another rank waits: then the others have come further.
  Where nobody waits, all stand in the same place (a file system that is gone): none is better than the others, and all
  are left alone for as long as the user's ceiling allows.
- Where everyone waits and nothing moves, nobody is at fault: a wake-up was lost. All begin again.
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
    """Looks at the slots every now and then.

    Args:
        limits: The user's limits.
        interval_s: How often it looks.
    """

    def __init__(self, limits: HangLimits, interval_s: float) -> None:
        self._limits, self._interval_s = limits, interval_s
        self._looked: float | None = None
        self._gaps: list[_Gap] = []
        self._retried: dict[int, float] = {}  # when ranks that wait in a collective were last called back, by rank
        self._retry = 0.0

    def looks(self, now: float) -> None:
        """It looks at ``now``. If that is late, the machine or everyone's process group slept: nobody is blamed."""
        if self._looked is not None and now - self._looked > 2 * self._interval_s:
            self._gaps = [*self._gaps, _Gap(now, now - self._looked - self._interval_s)][-16:]
        self._looked = now

    def looked(self, now: float) -> None:
        """It has looked until ``now``; what it did meanwhile is no sleep."""
        self._looked = now

    def overdue(self, slots: Mapping[int, Slot], now: float) -> tuple[int, ...]:
        """Ranks that should have written again."""
        return tuple(rank for rank, slot in slots.items() if now > slot.deadline + self._slept_since(slot.written))

    def culprits(self, slots: Mapping[int, Slot], findings: Mapping[int, Finding], now: float) -> tuple[int, ...]:
        """Ranks that are to be replaced.

        Args:
            slots: Of all live ranks.
            findings: What each overdue rank is at.
            now: The time.
        """
        suspects = tuple(rank for rank, finding in findings.items() if self._suspect(rank, slots[rank], finding, now))
        if any(self.waits(rank, slot, findings) for rank, slot in slots.items() if rank not in suspects):
            return suspects
        if len(suspects) < len(slots):
            return ()  # the others are busy; in the end they wait, or are suspects themselves
        patience_s = self._limits.max_s
        return tuple(r for r in suspects if now - slots[r].since - self._slept_since(slots[r].since) > patience_s)

    def stalled(self, slots: Mapping[int, Slot], findings: Mapping[int, Finding], now: float) -> bool:
        """Whether all wait for each other, for longer than a rank may go without progress."""
        if not slots or not all(self.waits(rank, slot, findings) for rank, slot in slots.items()):
            return False
        last = max(self._retry, *(slot.since for slot in slots.values()))
        return now - last - self._slept_since(last) > self._limits.min_s

    def retried(self, slots: Mapping[int, Slot], now: float) -> None:
        """All ranks have been called back from what they wait in; who does not come has no excuse any more."""
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
