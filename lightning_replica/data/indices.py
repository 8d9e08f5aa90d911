"""The indices that a DataLoader hands to whoever loads: all of them, or all but the first."""

from collections.abc import Callable, Iterator
from typing import Any


class Blank:
    """In place of indices: loads nothing, but gives the next ones to the next worker."""


class Indices:
    """A batch sampler, or a sampler, whose next iteration leaves out the first indices.

    Args:
        sampler: The loader's own.

    Attributes:
        skip: How many come to nothing.
        blanks: How many after those come as `Blank`.
        mute: Whether the next iteration is only asked for, and its like in the run was not.
        before_seed: Called when the next iteration has been asked for, before the loader draws a seed.
    """

    def __init__(self, sampler: Any) -> None:
        self._sampler = sampler
        self._indices: Iterator[Any] = iter(())
        self._stopped = False
        self.skip = self.blanks = 0
        self.mute = False
        self.before_seed: Callable[[], None] | None = None

    def __getattr__(self, name: str) -> Any:
        if name == "_sampler":
            raise AttributeError(name)
        return getattr(self._sampler, name)

    def __len__(self) -> int:
        return len(self._sampler)

    def __iter__(self) -> Iterator[Any]:
        if self.mute:
            self.mute = False
            return iter(())
        self._stopped = False
        self._indices = iter(self._sampler)
        if self.before_seed is not None:
            self.before_seed()
            self.before_seed = None
        return self._rest()

    def advance(self) -> None:
        """Leaves out what the iteration that has just begun is to leave out, before anything else draws numbers."""
        skip, self.skip = self.skip, 0
        for _ in range(skip):
            next(self._indices, None)

    def stop(self) -> None:
        """Ends the iteration: what has been handed out is still loaded, and nothing more."""
        self._stopped = True

    def _rest(self) -> Iterator[Any]:
        indices, blanks = self._indices, self.blanks
        self.advance()
        self.blanks = 0
        for _ in range(blanks):
            next(indices, None)
            yield Blank()
        while not self._stopped:
            try:
                yield next(indices)
            except StopIteration:
                return
