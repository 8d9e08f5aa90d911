"""What is not restored exactly after a fault, as the program itself has found it out."""

import logging
import re
from collections import Counter
from dataclasses import dataclass
from typing import Final, Literal, Protocol, TypeAlias

log = logging.getLogger(__name__)

_NUMBERS: Final = re.compile(r"\d+")
_SAID_OF_A_KIND: Final = 3  # findings that differ in numbers only, as for the items of a list

Scope: TypeAlias = Literal["fault", "replacement", "resume", "once", "unknown"]
"""What a finding concerns.

"fault": every fault. "replacement": those in which ranks are replaced. "resume": runs that resume from a checkpoint.
"once": only what has happened already. "unknown": maybe every fault, as nothing shows whether it does.
"""

_SAID: Final[dict[Scope, str]] = {
    "fault": "Not exact after a fault",
    "replacement": "Not exact after a fault",
    "resume": "Not exact after a resume",
    "once": "Not exact",
    "unknown": "May not be exact after a fault",
}


class Report(Protocol):
    """Called with the name of something, with why it is not restored, and with what this concerns."""

    def __call__(self, name: str, why: str, scope: Scope = "fault") -> None:
        """Report it."""


@dataclass(frozen=True)
class Finding:
    """Something that is not restored exactly.

    Attributes:
        name: Its name.
        why: Why it is not restored.
        scope: What this concerns.
    """

    name: str
    why: str
    scope: Scope


def warn(name: str, why: str, scope: Scope = "fault") -> None:
    """Log a finding that nobody keeps."""
    log.warning("%s: %s: %s.", _SAID[scope], name, why)


def say_nothing(name: str, why: str, scope: Scope = "fault") -> None:
    """Leave a finding to others, who look at the same objects."""


class Inexact:
    """Says what is not restored exactly after a fault, each finding once, and keeps it.

    Of findings that differ in numbers only, the first ones are said. All are kept.
    """

    def __init__(self) -> None:
        self._findings: dict[Finding, None] = {}
        self._of_kind = Counter[str]()  # findings whose texts differ in numbers only
        self._reported: set[Finding] = set()

    @property
    def known(self) -> dict[str, Finding]:
        """What has been found, by name; the newest finding of each."""
        return {finding.name: finding for finding in self._findings}

    def report(self, name: str, why: str, scope: Scope = "fault") -> None:
        """Say why something is not restored, unless that has been said."""
        finding = Finding(name, why, scope)
        if finding in self._findings:
            return
        self._findings[finding] = None
        kind = _NUMBERS.sub("#", f"{scope} {name} {why}")
        self._of_kind[kind] += 1
        if self._of_kind[kind] <= _SAID_OF_A_KIND:
            warn(name, why, scope)
        elif self._of_kind[kind] == _SAID_OF_A_KIND + 1:
            log.warning("%s: %s, and others like it: %s.", _SAID[scope], name, why)

    def after(self, replaced: bool) -> dict[str, str]:
        """Return what is not exact after a fault that has just been recovered from: the reasons, by name.

        What has happened once is in one result only.

        Args:
            replaced: Whether ranks were replaced.
        """
        concerns = {"fault", "replacement"} if replaced else {"fault"}
        unreported = {finding for finding in self._findings if finding.scope == "once"} - self._reported
        self._reported |= unreported
        found = [finding for finding in self._findings if finding.scope in concerns or finding in unreported]
        return {finding.name: finding.why for finding in found}
