"""What is not restored exactly after a fault, as the program itself has found it out."""

import logging
from dataclasses import dataclass
from typing import Final, Literal, Protocol, TypeAlias

log = logging.getLogger(__name__)

Scope: TypeAlias = Literal["fault", "replacement", "once", "unknown"]
"""Which faults a finding concerns: every one, those in which ranks are replaced, or only one that has happened.

"unknown": it may concern every one, and nothing shows whether it does.
"""


_SAID: Final[dict[Scope, str]] = {
    "fault": "Not exact after a fault",
    "replacement": "Not exact after a fault",
    "once": "Not exact",
    "unknown": "May not be exact after a fault",
}


class Report(Protocol):
    """Called with the name of something, with why it is not restored, and with the faults that this concerns."""

    def __call__(self, name: str, why: str, scope: Scope = "fault") -> None:
        """Report it."""


@dataclass(frozen=True)
class Finding:
    """Something that is not restored exactly.

    Attributes:
        why: Why it is not restored.
        scope: The faults that this concerns.
    """

    why: str
    scope: Scope


class Inexact:
    """Says once, by name, what is not restored exactly after a fault.

    Attributes:
        known: What has been found, by name.
    """

    def __init__(self) -> None:
        self.known: dict[str, Finding] = {}
        self._told: set[str] = set()

    def report(self, name: str, why: str, scope: Scope = "fault") -> None:
        """Say why something is not restored, unless that has been said."""
        if name not in self.known:
            self.known[name] = Finding(why, scope)
            log.warning("%s: %s: %s.", _SAID[scope], name, why)

    def after(self, replaced: bool) -> dict[str, str]:
        """Return what is not exact after a fault that has just been recovered from: the reasons, by name.

        Args:
            replaced: Whether ranks were replaced.
        """
        concerns = {"fault", "replacement"} if replaced else {"fault"}
        untold = {name for name, each in self.known.items() if each.scope == "once"} - self._told
        self._told |= untold
        return {name: each.why for name, each in self.known.items() if each.scope in concerns or name in untold}
