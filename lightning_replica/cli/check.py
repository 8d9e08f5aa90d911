"""One thing that `lightning-replica doctor` has looked at."""

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True)
class Check:
    """One thing that was looked at.

    Attributes:
        name: What.
        status: ``failed`` where training cannot work, ``note`` where it may matter.
        found: What was found.
        advice: What to do; empty where nothing is to be done.
    """

    name: str
    status: Literal["ok", "note", "failed"]
    found: str
    advice: str = ""
