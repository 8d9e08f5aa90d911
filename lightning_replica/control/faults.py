"""Faults, as the process that detected one describes it to all others: the value of a generation's key in the store."""

import json
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal, TypeAlias

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

    def to_json(self, token: str = "") -> str:
        """Return the fault as a line of JSON; ``token`` makes the line unique."""
        return json.dumps([self.detected, self.ranks, self.text, token])

    @classmethod
    def from_json(cls, line: str) -> "Fault":
        """Make a fault from what `to_json` returned."""
        detected, ranks, text, _ = json.loads(line)
        return cls(detected, tuple(ranks), text)


def most_telling(faults: Iterable[Fault]) -> Fault:
    """Return the fault that tells most about the cause: a death, for example, tells more than a peer that is gone."""
    return min(faults, key=lambda fault: _TELLING.index(fault.detected))
