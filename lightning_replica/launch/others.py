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

    def relocate(self, ranks: tuple[int, ...], fault: Fault) -> str:
        """Begin a generation with this fault, and have another node start the ranks; return which, in words."""

    def may_leave(self) -> bool:
        """Return whether a supervisor without ranks may end; if not, ranks may still be given to it."""

    def ended(self) -> None:
        """Note that all ranks of this node have ended."""


class Nobody:
    """There is no other node."""

    def begin(self, put: Put) -> None:
        """Do nothing."""

    def relocate(self, ranks: tuple[int, ...], fault: Fault) -> str:
        """Raise an error: no other node can be lost."""
        raise RuntimeError(f"there is no other node for ranks {ranks}")

    def may_leave(self) -> bool:
        """Return true: the run is over once the ranks of the only node have ended."""
        return True

    def ended(self) -> None:
        """Do nothing."""
