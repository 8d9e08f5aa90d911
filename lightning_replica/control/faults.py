"""Faults, as the process that detected one describes it to all others: the value of a generation's key in the store."""

import json
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Final, Literal, TypeAlias

from lightning_replica.control.untrusted import from_json
from lightning_replica.errors import ProtocolError

Detected: TypeAlias = Literal[
    "death", "hang", "corrupted shard", "device error", "worker death", "exception", "peer gone", "end"
]
"""How a fault was detected. "device error": the device had an error of its own, whatever its rank was doing. "worker
death": a worker of a rank's DataLoader has died. "peer gone": a collective failed, and another process will report
whose fault that is. "end": the run was given up."""

_TELLING: tuple[Detected, ...] = (
    "death",
    "hang",
    "corrupted shard",
    "device error",
    "worker death",
    "exception",
    "end",
    "peer gone",
)


@dataclass(frozen=True)
class Fault:
    """What ended a generation.

    Attributes:
        detected: How the fault was detected.
        ranks: The ranks whose fault it is, if they are known.
        text: One line for the user.
    """

    detected: Detected
    ranks: tuple[int, ...]
    text: str

    @property
    def is_replaced(self) -> bool:
        """Whether a supervisor has begun this generation to replace ranks."""
        return self.detected in ("death", "hang") and bool(self.ranks)

    def to_json(self, token: str = "", note: str = "") -> str:
        """Return the fault as a line of JSON.

        Args:
            token: Makes the line unique.
            note: What supervisors tell each other with the fault.
        """
        return json.dumps([self.detected, self.ranks, self.text, token, note])

    @classmethod
    def from_json(cls, line: str | bytes) -> "Fault":
        """Make a fault from what `to_json` returned.

        Raises:
            ProtocolError: If it is something else.
        """
        return cls.with_note(line)[0]

    @classmethod
    def with_note(cls, line: str | bytes) -> tuple["Fault", str]:
        """Make a fault from what `to_json` returned, and return it with the note.

        Raises:
            ProtocolError: If it is something else.
        """
        try:
            detected, ranks, text, _, note = from_json(line)
            if detected not in _TELLING:
                raise ValueError(f"{detected!r} is no kind of fault")
            return cls(detected, tuple(map(int, ranks)), str(text)), str(note)
        except (ValueError, TypeError, OverflowError) as error:
            raise ProtocolError(f"{line[:80]!r} is no fault: {error}") from error


UNREADABLE: Final = Fault("peer gone", (), "the fault was written over by a stranger"), ""
"""The fault and the note of an entry of the log that no process of this package can have written."""


def most_telling(faults: Iterable[Fault]) -> Fault:
    """Return the fault that tells most about the cause: a death, for example, tells more than a peer that is gone."""
    return min(faults, key=lambda fault: _TELLING.index(fault.detected))
