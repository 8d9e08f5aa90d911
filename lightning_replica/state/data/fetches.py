"""The fetches of a training loop: each takes a batch from all loaders, as Lightning's CombinedLoader combines them.

[Note: fetches]
A loader has a position of its own (position.py), but does not record which of its batches went into which fetch: a
short loader begins again, or gives no batch, or waits for its turn. So the positions of all loaders, the state of the
combining and the random state are noted before each fetch. A rank that goes back to before a fetch restores all this.
It then repeats the fetches that Lightning had made ahead of the training, each in the random state in which it was
first made.
"""

from collections import deque
from collections.abc import Sequence
from functools import cache
from typing import Any, NamedTuple

from lightning_replica._compat.lightning import combining_state, put_combining_state
from lightning_replica._compat.lightning_names import CombinedLoader
from lightning_replica.devices.host import rng_state, set_rng_state
from lightning_replica.state.data.inputs import Inputs
from lightning_replica.state.data.loader_state import LoaderState
from lightning_replica.state.data.position import ExactLoader

_BACK = 2  # fetches that may have to be repeated: the step's last batch, and one ahead of it


class Fetching(NamedTuple):
    """How far fetching has come.

    Attributes:
        combining: State of the iterator that combines the loaders; None if it is not known.
        random: Random states in which the next fetches were made, for those that were made already.
    """

    combining: dict[str, Any] | None = None
    random: tuple[bytes, ...] = ()

    @classmethod
    def of(cls, plain: Sequence[Any]) -> "Fetching":
        """Return the progress whose items are ``plain``; sequences may have become lists on the way."""
        combining, random = plain
        return cls(combining, tuple(random))


class _Noted(NamedTuple):
    """The state before a fetch."""

    loaders: list[LoaderState]
    combining: dict[str, Any]
    random: bytes


class Fetches:
    """Notes the newest fetches of one combined loader.

    Args:
        combined: The combined loader.
        loaders: The loaders that it iterates.
    """

    def __init__(self, combined: Any, loaders: Sequence[ExactLoader]) -> None:
        self._combined, self._loaders = combined, loaders
        self._noted: deque[_Noted] = deque(maxlen=_BACK)
        self._ended: _Noted | None = None  # the state before the fetch that found no more batches
        self._begin_at: dict[str, Any] | None = None
        self._again: list[bytes] = []

    def state(self, back: int) -> tuple[list[LoaderState], Fetching]:
        """Return the states of the loaders and the progress of fetching, as they were ``back`` fetches ago."""
        after = [self._ended] if self._ended is not None else []
        entries = [*list(self._noted)[len(self._noted) - min(back, len(self._noted)) :], *after]
        if not entries:
            noted = self._note(b"")
            return noted.loaders, Fetching(noted.combining)
        return entries[0].loaders, Fetching(entries[0].combining, tuple(entry.random for entry in entries))

    def state_between_epochs(self, ahead: int) -> tuple[list[LoaderState], Fetching]:
        """Return the same between epochs, where the next iteration may have begun and made ``ahead`` fetches."""
        states, fetching = self.state(ahead)
        begun = [loader.has_begun and loader.position == ahead for loader in self._loaders]
        pairs = zip(self._loaders, states, begun, strict=True)
        return [state if has_begun else loader.state_between() for loader, state, has_begun in pairs], (
            fetching if any(begun) else Fetching()
        )

    def mark(self, ahead: int) -> None:
        """Note that a window began ``ahead`` fetches ago: nobody will ask for earlier fetches again."""
        states, _ = self.state(ahead)
        for loader, state in zip(self._loaders, states, strict=True):
            loader.mark(state)

    def rewind(self, states: Sequence[LoaderState], fetching: Fetching) -> None:
        """Make the next iteration begin at what `state` has returned.

        Call this before the random state is restored, because starting a loader draws from the generators.
        """
        waiting = _waiting(fetching.combining or {}, len(self._loaders))
        for number, (loader, state) in enumerate(zip(self._loaders, states, strict=True)):
            (loader.inherit if number in waiting else loader.rewind)(state)
        self.expect(fetching)

    def expect(self, fetching: Fetching) -> None:
        """Make the next iteration begin at ``fetching``, whatever the positions of the loaders are."""
        self._begin_at, self._again = fetching.combining, list(fetching.random)

    # Called by the combined loader

    def begun(self) -> None:
        """Note that an iteration has begun, and restore the progress that `expect` was given."""
        self._noted.clear()
        self._ended = None
        if self._begin_at is not None:
            put_combining_state(self._combined, self._begin_at)
        self._begin_at = None

    def fetch(self) -> _Noted:
        """Prepare a fetch, and return the state before it."""
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
        """Note that a fetch has returned a batch."""
        self._noted.append(noted)

    def ended(self, noted: _Noted) -> None:
        """Note that a fetch has found no more batches."""
        self._ended = self._ended or noted


def _waiting(combining: dict[str, Any], count: int) -> range:
    """Return the numbers of loaders whose turn is still to come, if one is iterated after another."""
    return range(combining.get("_iterator_idx", count) + 1, count)


class _Noting(CombinedLoader):
    """A combined loader that notes its fetches, and may go on without inputs."""

    fetches: Fetches
    inputs: Inputs | None

    def __len__(self) -> int:
        return super().__len__() if self.inputs is None else len(self.inputs)

    def __iter__(self) -> Any:
        super().__iter__()
        self.fetches.begun()
        if self.inputs is not None:
            self.inputs.begin()
        return self

    def __next__(self) -> Any:
        noted = self.fetches.fetch()
        try:
            batch = super().__next__() if self.inputs is None else self.inputs.fetch(super().__next__)
        except StopIteration:
            self.fetches.ended(noted)
            raise
        self.fetches.fetched(noted)
        return batch


@cache
def _noting(of: type[CombinedLoader]) -> type[CombinedLoader]:
    return type(of.__name__, (_Noting, of), {"__module__": of.__module__})


def note(combined: CombinedLoader, loaders: Sequence[ExactLoader], inputs: Inputs | None = None) -> None:
    """Make ``combined`` note its fetches, and fetch by ``inputs`` if ranks may have different numbers of batches."""
    if not isinstance(combined, _Noting):
        combined.__class__ = _noting(type(combined))
    vars(combined).update(fetches=Fetches(combined, loaders), inputs=inputs)


def forget(combined: CombinedLoader) -> None:
    """Leave ``combined`` as it would be without this package."""
    if isinstance(combined, _Noting):
        del combined.fetches, combined.inputs
        combined.__class__ = type(combined).__bases__[1]


def fetches_of(combined: CombinedLoader | None) -> Fetches | None:
    """Return the fetches that ``combined`` has noted; None if it notes nothing."""
    return combined.fetches if isinstance(combined, _Noting) else None


def inputs_of(combined: CombinedLoader | None) -> Inputs | None:
    """Return the inputs by which ``combined`` fetches; None if all ranks have the same number of batches."""
    return combined.inputs if isinstance(combined, _Noting) else None
