"""The result of one check of `lightning-replica doctor`."""

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True)
class Check:
    """The result of one check.

    Attributes:
        name: What was checked.
        status: ``failed`` if training cannot work, ``note`` if the finding may matter, else ``ok``.
        found: What was found.
        advice: What the user can do; empty if nothing need be done.
    """

    name: str
    status: Literal["ok", "note", "failed"]
    found: str
    advice: str = ""
