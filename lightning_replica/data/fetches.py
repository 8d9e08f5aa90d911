"""What a training loop fetches: a batch of all its loaders at once, as Lightning's CombinedLoader puts it together.

[Note: fetches]
A loader knows where it stands (position.py), but not which of its batches went into which fetch: a short one is begun
anew, or gives none, or waits for its turn. So before each fetch it is noted where all of them stand, how far the
combining has come, and the random state. A rank that goes back to before a fetch puts all this back, and makes anew
those fetches that Lightning had made ahead of the training, each in the random state in which it was made.
"""

from collections import deque
from collections.abc import Sequence
from functools import cache
from typing import Any, NamedTuple

from lightning.pytorch.utilities.combined_loader import CombinedLoader

from lightning_replica._compat.lightning import combining_state, put_combining_state
from lightning_replica.data.loader_state import LoaderState
from lightning_replica.data.position import ExactLoader
from lightning_replica.devices.host import rng_state, set_rng_state

_BACK = 2  # fetches that may have to be made again: the step's last batch, and one ahead of it


class Fetching(NamedTuple):
    """How far fetching has come.

    Attributes:
        combining: State of the iterator that combines the loaders; None where nobody knows.
        random: Random states in which the next fetches were made, as far as they have been.
    """

    combining: dict[str, Any] | None = None
    random: tuple[bytes, ...] = ()

    @classmethod
    def of(cls, plain: Sequence[Any]) -> "Fetching":
        """The inverse of ``list``: sequences may have become lists on the way."""
        combining, random = plain
        return cls(combining, tuple(random))


class _Noted(NamedTuple):
    """How things stood before a fetch."""

    loaders: list[LoaderState]
    combining: dict[str, Any]
    random: bytes


class Fetches:
    """Notes the newest fetches of one combined loader.

    Args:
        combined: The combined loader.
        loaders: What it iterates.
    """

    def __init__(self, combined: Any, loaders: Sequence[ExactLoader]) -> None:
        self._combined, self._loaders = combined, loaders
        self._noted: deque[_Noted] = deque(maxlen=_BACK)
        self._ended: _Noted | None = None  # before the fetch that found nothing more
        self._begin_at: dict[str, Any] | None = None
        self._again: list[bytes] = []

    def state(self, back: int) -> tuple[list[LoaderState], Fetching]:
        """Where the loaders stand, or stood ``back`` fetches ago."""
        after = [self._ended] if self._ended is not None else []
        entries = [*list(self._noted)[len(self._noted) - min(back, len(self._noted)) :], *after]
        if not entries:
            noted = self._note(b"")
            return noted.loaders, Fetching(noted.combining)
        return entries[0].loaders, Fetching(entries[0].combining, tuple(entry.random for entry in entries))

    def state_between_epochs(self, ahead: int) -> tuple[list[LoaderState], Fetching]:
        """The same between epochs, where the next iteration may have begun; ``ahead`` fetches of it are made."""
        states, fetching = self.state(ahead)
        begun = [loader.has_begun and loader.position == ahead for loader in self._loaders]
        pairs = zip(self._loaders, states, begun, strict=True)
        return [state if here else loader.state_between() for loader, state, here in pairs], (
            fetching if any(begun) else Fetching()
        )

    def mark(self, ahead: int) -> None:
        """A window begins here, ``ahead`` fetches ago: earlier ones will not be asked for again."""
        states, _ = self.state(ahead)
        for loader, state in zip(self._loaders, states, strict=True):
            loader.mark(state)

    def rewind(self, states: Sequence[LoaderState], fetching: Fetching) -> None:
        """Makes the next iteration begin at what `state` has returned.

        Call it before the random state is put back: starting a loader draws from the generators.
        """
        waiting = _waiting(fetching.combining or {}, len(self._loaders))
        for number, (loader, state) in enumerate(zip(self._loaders, states, strict=True)):
            (loader.inherit if number in waiting else loader.rewind)(state)
        self.expect(fetching)

    def expect(self, fetching: Fetching) -> None:
        """Makes the next iteration begin at ``fetching``, wherever the loaders stand."""
        self._begin_at, self._again = fetching.combining, list(fetching.random)

    # Called by the combined loader

    def begun(self) -> None:
        """An iteration has begun."""
        self._noted.clear()
        self._ended = None
        if self._begin_at is not None:
            put_combining_state(self._combined, self._begin_at)
        self._begin_at = None

    def fetch(self) -> _Noted:
        """A fetch begins."""
        if self._again:
            set_rng_state(self._again.pop(0))
        return self._note(rng_state())

    def _note(self, random: bytes) -> _Noted:
        combining = combining_state(self._combined)
        waiting = _waiting(combining, len(self._loaders))
        states = [
            loader.state_between() if number in waiting else loader.state()
            for number, loader in enumerate(self._loaders)
        ]
        return _Noted(states, combining, random)

    def fetched(self, noted: _Noted) -> None:
        """It has brought a batch."""
        self._noted.append(noted)

    def ended(self, noted: _Noted) -> None:
        """It has found nothing more."""
        self._ended = self._ended or noted


def _waiting(combining: dict[str, Any], count: int) -> range:
    """The loaders whose turn is still to come, where one is iterated after another."""
    return range(combining.get("_iterator_idx", count) + 1, count)


class _Noting(CombinedLoader):
    """Notes its fetches."""

    fetches: Fetches

    def __iter__(self) -> Any:
        super().__iter__()
        self.fetches.begun()
        return self

    def __next__(self) -> Any:
        noted = self.fetches.fetch()
        try:
            batch = super().__next__()
        except StopIteration:
            self.fetches.ended(noted)
            raise
        self.fetches.fetched(noted)
        return batch


@cache
def _noting(of: type[CombinedLoader]) -> type[CombinedLoader]:
    return type(of.__name__, (_Noting, of), {"__module__": of.__module__})


def note(combined: CombinedLoader, loaders: Sequence[ExactLoader]) -> None:
    """Has ``combined`` note its fetches."""
    if not isinstance(combined, _Noting):
        combined.__class__ = _noting(type(combined))
    vars(combined)["fetches"] = Fetches(combined, loaders)


def forget(combined: CombinedLoader) -> None:
    """Leaves ``combined`` as it would be without us."""
    if isinstance(combined, _Noting):
        del combined.fetches
        combined.__class__ = type(combined).__bases__[1]


def fetches_of(combined: CombinedLoader | None) -> Fetches | None:
    """What ``combined`` has noted; None if it notes nothing."""
    return combined.fetches if isinstance(combined, _Noting) else None
