"""A training loader that can be put back to any position of its epoch.

[Note: position]
The position is the number of batches that have been yielded in this epoch; the order of samples must be a function
of seed, epoch, rank and world alone, as ``DistributedSampler`` makes it. Two ways lead back. A rank that was there
keeps the batches since the last mark and yields them again, each followed by the random state in which it left
the generators, because loading may draw random numbers. A replacement, or a rank that has already begun another
epoch, skips: the sampler's indices are drawn and dropped, no skipped sample is loaded.
"""

from collections.abc import Callable, Iterator
from typing import Any

_END = object()


class ExactLoader:
    """Wraps a training dataloader; everything but iteration is the loader's own.

    Iteration starts lazily: no index is drawn and no worker started before the first batch is asked for, which is
    after ``set_epoch``.

    Args:
        loader: What the user's dataloader hook returned, with its distributed sampler.
        rng_state: Returns the state of all generators.
        set_rng_state: Puts them back.
    """

    def __init__(self, loader: Any, rng_state: Callable[[], bytes], set_rng_state: Callable[[bytes], None]) -> None:
        self._loader = loader
        self._rng_state, self._set_rng_state = rng_state, set_rng_state
        self._skipping = _skip_in_sampler(loader)
        self._live: Iterator[Any] | None = None
        self._live_epoch = self._epoch = 0
        self._drawn = 0  # batches that `_live` has yielded
        self._kept: list[tuple[Any, bytes]] = []  # those since the mark: the last `len(_kept)` of `_drawn`
        self.position = 0
        self._rewound = False

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") or name in ("state_dict", "load_state_dict", "_loader"):
            raise AttributeError(name)
        return getattr(self._loader, name)

    def __len__(self) -> int:
        return len(self._loader)

    def begin_epoch(self, epoch: int) -> None:
        """Says which epoch the next iteration belongs to."""
        self._epoch = epoch

    def mark(self) -> None:
        """A window begins here: batches before it will not be asked for again."""
        ahead = self._drawn - self.position
        self._kept = self._kept[len(self._kept) - ahead :]

    def rewind(self, epoch: int, position: int) -> None:
        """Makes the next iteration begin at ``position`` of ``epoch``.

        Call it before the random state is put back: starting a loader draws from the generators.
        """
        self.begin_epoch(epoch)
        first = self._drawn - len(self._kept)
        if self._live is None or self._live_epoch != epoch or not first <= position <= self._drawn:
            self._live = None  # at 0 the loader starts with the first batch, and draws then, as it always does
            if position:
                self._start(position)
        self.position = position
        self._rewound = True

    def __iter__(self) -> Iterator[Any]:
        if self._rewound:
            self._rewound = False
        else:
            self._live = None
            self.position = 0
        return self._batches()

    def _batches(self) -> Iterator[Any]:
        if self._live is None:
            self._start(0)
        while True:
            if self.position < self._drawn:
                batch, state = self._kept[self.position - self._drawn]
                self._set_rng_state(state)
            else:
                batch = next(self._live, _END) if self._live is not None else _END
                if batch is _END:
                    return
                self._drawn += 1
                self._kept.append((batch, self._rng_state()))
            self.position += 1
            yield batch

    def _start(self, position: int) -> None:
        """Begins to draw at ``position``, with nothing kept."""
        if self._skipping is not None:
            self._skipping.skip = position
        self._live = iter(self._loader)
        if self._skipping is None:
            for _ in range(position):
                next(self._live, _END)
        self._live_epoch, self._drawn, self._kept = self._epoch, position, []


class _SkippingBatchSampler:
    """A batch sampler whose next iteration leaves out the first ``skip`` batches."""

    def __init__(self, batch_sampler: Any) -> None:
        self._batch_sampler = batch_sampler
        self.skip = 0

    def __getattr__(self, name: str) -> Any:
        if name == "_batch_sampler":
            raise AttributeError(name)
        return getattr(self._batch_sampler, name)

    def __len__(self) -> int:
        return len(self._batch_sampler)

    def __iter__(self) -> Iterator[Any]:
        skip, self.skip = self.skip, 0
        indices = iter(self._batch_sampler)
        for _ in range(skip):
            next(indices, None)
        yield from indices


def _skip_in_sampler(loader: Any) -> _SkippingBatchSampler | None:
    """Puts a skipping batch sampler into ``loader``; None if it has no batch sampler to skip in."""
    batch_sampler = getattr(loader, "batch_sampler", None)
    if batch_sampler is None:
        return None
    if isinstance(batch_sampler, _SkippingBatchSampler):  # the user's own loader, in a second fit
        return batch_sampler
    skipping = _SkippingBatchSampler(batch_sampler)
    # DataLoader.__setattr__ forbids this after construction because its own sampler would no longer agree; ours does.
    object.__setattr__(loader, "batch_sampler", skipping)
    return skipping
