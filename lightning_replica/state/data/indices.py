"""The indices that a DataLoader gives to its workers, or loads itself: all of them, or all but the first."""

from collections.abc import Callable, Iterator
from typing import Any


class Blank:
    """Takes the place of indices: a worker loads nothing for it, and the next indices go to the next worker."""


class Indices:
    """A batch sampler, or a sampler, whose next iteration leaves out the first indices.

    Args:
        sampler: The loader's own sampler.

    Attributes:
        skip: How many indices the next iteration skips.
        blanks: How many indices after those are replaced by a `Blank`.
        mute: Whether the next ``iter`` yields nothing and does not iterate the sampler, because the original run did
            not call ``iter`` there.
        before_seed: Called when the next iteration has begun, before the loader draws a seed.
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
        """Skip what the iteration that has just begun has to skip, before other code draws random numbers."""
        skip, self.skip = self.skip, 0
        for _ in range(skip):
            next(self._indices, None)

    def stop(self) -> None:
        """End the iteration: indices that were handed out are still loaded, and nothing more."""
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
