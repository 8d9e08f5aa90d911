"""Ends of ranks that a replacement would only repeat: the same rank, the same exit code, the same position."""

from dataclasses import dataclass

from lightning_replica.exit_codes import DEVICE_LOST
from lightning_replica.launch.beacons import Slot
from lightning_replica.launch.crashes import SIGNALS


@dataclass(frozen=True)
class End:
    """How and where a rank's process ended.

    Attributes:
        code: Its exit code, -n for signal n.
        position: Where the rank was, an index into `beacons.POSITIONS`.
        step: Number of applied updates; -1 before the first batch.
    """

    code: int
    position: int
    step: int


class Repeats:
    """Remembers how each rank last ended.

    Most signals come from outside, so deaths by them do not count; `crashes.SIGNALS` come from inside. Losses of a
    device do not count, as the next process may get another device. But a process that calls `sys.exit` in a training
    step, or fails on its way to the first batch, has caused its own end.
    """

    def __init__(self) -> None:
        self._last: dict[int, End] = {}

    def again(self, rank: int, code: int, slot: Slot | None) -> bool:
        """Record the end of ``rank``, and return whether its last end before was the same.

        Args:
            rank: The rank.
            code: Its exit code, -n for signal n.
            slot: What its process has last written; None if unknown.
        """
        from_outside = code < 0 and -code not in SIGNALS
        if from_outside or code == DEVICE_LOST or slot is None:
            self._last.pop(rank, None)
            return False
        end = End(code, slot.position, slot.step)
        before, self._last[rank] = self._last.get(rank), end
        return before == end
