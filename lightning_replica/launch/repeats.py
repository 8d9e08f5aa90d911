"""Ends of ranks that another process would only repeat: the same rank, the same exit code, the same place."""

from dataclasses import dataclass

from lightning_replica.exit_codes import DEVICE_LOST
from lightning_replica.launch.beacons import Slot


@dataclass(frozen=True)
class End:
    """How and where a rank's process has ended.

    Attributes:
        code: Its exit code, -n for signal n.
        place: Where it was, an index into `beacons.PLACES`.
        step: Updates that were applied; -1 before its first batch.
    """

    code: int
    place: int
    step: int


class Repeats:
    """Remembers how each rank has ended last.

    A signal comes from outside, and a device that was lost is another one the next time. But who calls `sys.exit` in a
    training step, or fails on its way to the first batch, has done it by itself.
    """

    def __init__(self) -> None:
        self._last: dict[int, End] = {}

    def again(self, rank: int, code: int, slot: Slot | None) -> bool:
        """Return whether ``rank`` has ended like this before, and nowhere else in between.

        Args:
            rank: The rank.
            code: Its exit code, -n for signal n.
            slot: What its process has written last; None where that is not known.
        """
        if code < 0 or code == DEVICE_LOST or slot is None:
            self._last.pop(rank, None)
            return False
        end = End(code, slot.place, slot.step)
        before, self._last[rank] = self._last.get(rank), end
        return before == end
