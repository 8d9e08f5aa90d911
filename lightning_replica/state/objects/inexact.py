"""What is not restored exactly after a fault, as the program itself has found it out."""

import logging

log = logging.getLogger(__name__)


class Inexact:
    """Says once, by name, what is not restored exactly after a fault.

    Attributes:
        known: What has been said, by name.
    """

    def __init__(self) -> None:
        self.known: dict[str, str] = {}

    def report(self, name: str, why: str) -> None:
        """Say why something is not restored, unless that has been said."""
        if name not in self.known:
            self.known[name] = why
            log.warning("After a fault, this run is not exact in %s: %s.", name, why)
