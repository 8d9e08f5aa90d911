"""The state of an optimizer as code finds it between updates: keyed by pieces of parameters, not by parameters."""

from collections import defaultdict
from collections.abc import Collection, ItemsView, Iterator, KeysView, Mapping, ValuesView
from contextlib import contextmanager
from typing import Any

from torch.optim import Optimizer

from lightning_replica.core.inexact import Scope


class PieceStates(defaultdict[Any, dict[str, Any]]):
    """The states of pieces. It notes what code of the user's expects of it that it is not.

    Args:
        states: The states by piece.
        wholes: The ``id`` of each whole parameter of which there are pieces.
    """

    def __init__(self, states: Mapping[Any, Any], wholes: Collection[int]) -> None:
        super().__init__(dict, states)
        self.wholes = wholes
        self.is_updated = False
        self._noted = dict[tuple[str, Scope], None]()

    @contextmanager
    def in_update(self) -> Iterator[None]:
        """Note nothing in the block."""
        self.is_updated = True
        try:
            yield
        finally:
            self.is_updated = False

    def noted(self) -> list[tuple[str, Scope]]:
        """Return what was expected since the last call: why it is not exact, and what this concerns."""
        found, self._noted = [*self._noted], {}
        return found

    def _note(self, why: str, scope: Scope) -> None:
        if not self.is_updated:
            self._noted[why, scope] = None

    def _look_for(self, key: Any) -> None:
        if id(key) in self.wholes:
            why = "code looks for the state of a parameter, but each rank has the states of some pieces only"
            self._note(why, "once")

    def _note_all(self) -> None:
        why = "code looks at it between updates, and what it writes to it does not go back with a batch"
        self._note(why, "unknown")

    def __missing__(self, key: Any) -> Any:
        self._look_for(key)
        return super().__missing__(key)

    def __contains__(self, key: object) -> bool:
        self._look_for(key)
        return super().__contains__(key)

    def get(self, key: Any, default: Any = None) -> Any:
        """Return the state of a piece."""
        self._look_for(key)
        return super().get(key, default)

    def __iter__(self) -> Iterator[Any]:
        self._note_all()
        return super().__iter__()

    def keys(self) -> KeysView[Any]:  # type: ignore[override]
        """Return a view of the pieces."""
        self._note_all()
        return super().keys()

    def values(self) -> ValuesView[Any]:  # type: ignore[override]
        """Return a view of the states."""
        self._note_all()
        return super().values()

    def items(self) -> ItemsView[Any, Any]:  # type: ignore[override]
        """Return a view of both."""
        self._note_all()
        return super().items()


def note_accesses(optimizer: Optimizer, wholes: Collection[int]) -> PieceStates:
    """Make an optimizer have `PieceStates`, unless it has: code, or ``load_state_dict``, may have set another dict."""
    states = optimizer.state
    if not isinstance(states, PieceStates):
        states = optimizer.state = PieceStates(dict(states), wholes)
    states.wholes = wholes
    return states
