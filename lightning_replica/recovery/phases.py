"""The phases of a recovery, and how long each took."""

import enum
import logging
import time
from dataclasses import dataclass, field

from lightning_replica.core.points import Point, reach
from lightning_replica.core.ranges import Range

log = logging.getLogger(__name__)


class Phase(enum.Enum):
    """The phases: stop -> clean -> regroup -> repair -> rollback -> resume. A fault in any phase leads back to stop."""

    STOP = "stop"  # the generation is declared over; every rank leaves its collectives; the device stops
    CLEAN = "clean"  # process groups are torn down, the device reports what it still holds
    REGROUP = "regroup"  # every rank reports, the plan is made, devices start again, new groups are opened
    REPAIR = "repair"  # the committed step is applied where it was missed, shards move
    ROLLBACK = "rollback"  # parameters are rebuilt, host state goes back to the snapshot
    RESUME = "resume"  # peers mirror each other again; then training resumes


_NEXT = dict(zip([None, *Phase], [*Phase, None], strict=True))


@dataclass
class Timeline:
    """The duration of each phase of one recovery. A phase that was begun twice counts from its last beginning.

    Attributes:
        seconds: Seconds that each finished phase took.
        total_s: Seconds from the fault to the end of the last phase, failed attempts included.
    """

    seconds: dict[Phase, float] = field(default_factory=dict)
    total_s: float = 0.0

    def __post_init__(self) -> None:
        self._began = self._phase_began = time.monotonic()
        self._phase: Phase | None = None
        self._range = Range()

    def enter(self, phase: Phase) -> None:
        """End the phase under way and begin ``phase``: the next one, or STOP after a fault."""
        if phase is not Phase.STOP and phase is not _NEXT[self._phase]:
            raise RuntimeError(f"recovery goes from {self._phase} to {_NEXT[self._phase]}, not to {phase}")
        self._finish()
        self._phase = phase
        self._range.begin(f"recovery_{phase.value}")
        point: Point = phase.value
        reach(point)

    @property
    def elapsed_s(self) -> float:
        """Seconds since the fault."""
        return time.monotonic() - self._began

    def end(self) -> None:
        """End the last phase."""
        self._range.end()
        self._finish()
        self._phase = None

    def _finish(self) -> None:
        now = time.monotonic()
        if self._phase is not None:
            self.seconds[self._phase] = now - self._phase_began
            log.debug("recovery: %s took %.3f s", self._phase.value, now - self._phase_began)
        self._phase_began = now
        self.total_s = now - self._began
