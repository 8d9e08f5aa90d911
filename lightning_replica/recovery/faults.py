"""Faults, as whoever saw one describes it to everyone: the value of a generation's key in the store."""

import json
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal, TypeAlias

Detected: TypeAlias = Literal[
    "death", "hang", "corrupted shard", "device error", "worker death", "exception", "peer gone", "end"
]
"""How a fault was noticed. "device error": the device has one of its own, whatever its rank was doing. "worker death":
a worker of a rank's DataLoader has died. "peer gone": a collective failed, and whose fault that is, somebody else will
know. "end": the run was given up."""

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
        detected: How it was noticed.
        ranks: Whose fault it is, where that is known.
        text: One line for the user.
    """

    detected: Detected
    ranks: tuple[int, ...]
    text: str

    def to_json(self, token: str = "") -> str:
        """As a line of JSON; ``token`` makes it differ from all others."""
        return json.dumps([self.detected, self.ranks, self.text, token])

    @classmethod
    def from_json(cls, line: str) -> "Fault":
        """The inverse of `to_json`."""
        detected, ranks, text, _ = json.loads(line)
        return cls(detected, tuple(ranks), text)


def most_telling(faults: Iterable[Fault]) -> Fault:
    """The fault that says most: who died tells more than who noticed that somebody had."""
    return min(faults, key=lambda fault: _TELLING.index(fault.detected))
