"""The other nodes of a run, as one supervisor sees them."""

from collections.abc import Callable
from typing import Protocol, TypeAlias

from lightning_replica.control.faults import Fault

Put: TypeAlias = Callable[[Callable[[], None]], None]
"""Makes the supervisor's main thread call a function. Any thread may call this."""


class Others(Protocol):
    """What a supervisor needs from the code that knows the other nodes."""

    def begin(self, put: Put) -> None:
        """Begin to watch the other nodes. Called when this node's ranks have been started."""

    @property
    def restarts(self) -> int:
        """Number of processes and nodes that were replaced anywhere in this run, as far as known here."""

    def relocate(self, fault: Fault) -> str:
        """Begin a generation with this fault, in which other nodes start the ranks of lost nodes.

        Returns:
            The names of the nodes; empty if none is there yet. Then the ranks stay vacant until one comes.
        """

    @property
    def patience_s(self) -> float:
        """How long ranks of a lost node stay vacant before something else is done, in seconds."""

    def may_leave(self) -> bool:
        """Return whether a supervisor without ranks may end; if not, ranks may still be given to it."""

    def ended(self) -> None:
        """Note that all ranks of this node have ended."""


class Nobody:
    """There is no other node."""

    def begin(self, put: Put) -> None:
        """Do nothing."""

    @property
    def restarts(self) -> int:
        """Return 0: the supervisor counts what it replaces itself."""
        return 0

    def relocate(self, fault: Fault) -> str:
        """Raise an error: no other node can be lost."""
        raise RuntimeError(f"there is no other node: {fault.text}")

    @property
    def patience_s(self) -> float:
        """Return 0: no other node can be lost."""
        return 0.0

    def may_leave(self) -> bool:
        """Return true: the run is over once the ranks of the only node have ended."""
        return True

    def ended(self) -> None:
        """Do nothing."""
