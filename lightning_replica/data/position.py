"""A training loader that can be put back to any position of its epoch.

[Note: position]
The position is the number of batches that the training loop has taken in this epoch; the order of samples must be a
function of seed, epoch, rank and world, as ``DistributedSampler`` makes it, or of the random state in which the
iteration began, as ``RandomSampler`` makes it. Two ways lead back. A rank that was there keeps the batches since the
last mark and yields them again, each followed by the random state in which it left the generators, because loading may
draw random numbers. A new process, or a rank that has already begun another epoch, starts the loader again from the
random state in which it was started (a DataLoader draws the seed of its workers there) and skips:

- data with a length, in a DataLoader: indices are drawn and dropped, no skipped sample is loaded. Workers go on with
  the generators where they stood (workers.py), and every batch is loaded by the worker that would have loaded it;
- iterable data, ``batch_size=None``, loaders that are no DataLoader or iterate in their own way: batches are loaded and
  dropped, with workers too, whose random numbers so come out by themselves.

[Note: what is not exact]
State that a dataset keeps to itself and changes while loading (a generator of its own, a counter, a cache of random
choices) is in the workers' copies of it and starts anew, but for iterable data, which is drawn again from its
beginning. Iterable data without workers that fills a shuffle buffer with the global generators draws other numbers
while it skips; give it a generator of its own, or a worker. ``in_order=False`` gives up order by itself. The workers of
``persistent_workers=True`` are started anew.
"""

import copy
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any, NamedTuple

import torch
from torch.utils.data import DataLoader, IterableDataset

from lightning_replica._compat.torch import forget_workers
from lightning_replica.data.workers import BLANK, WorkerRandom

_END = object()


class LoaderState(NamedTuple):
    """Where one rank's loader stands.

    Attributes:
        batches: Batches taken in this iteration; the next one is number ``batches``.
        begun: Random state in which the iteration began; None if it has not.
        generator: State of the loader's own generator then; None if it has none.
        workers: Random state of each worker after its last batch; None for one that has drawn nothing.
        reused: Whether the iteration goes on with workers of the one before, which draws no seed for them.
        before: Random states before the next batches were loaded, as far as they have been; empty where workers load.
    """

    batches: int
    begun: bytes | None = None
    generator: bytes | None = None
    workers: tuple[bytes | None, ...] = ()
    reused: bool = False
    before: tuple[bytes, ...] = ()


class _Kept(NamedTuple):
    """A batch that may be asked for again.

    Attributes:
        batch: The batch.
        before: Where the loader stood before it.
        random: Random state of this process then.
        reported: Random state that the worker has reported with it.
        after: Random state of this process after it was loaded.
    """

    batch: Any
    before: LoaderState
    random: bytes
    reported: bytes | None
    after: bytes


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
        self._rng_state, self._set_rng_state = rng_state, set_rng_state
        self._random: WorkerRandom | None = None
        self._skipping: _SkippingBatchSampler | None = None
        self._loader = self._equip(loader) if _can_skip(loader) else loader
        self._live: Iterator[Any] | None = None
        self._live_epoch = self._epoch = 0
        self._drawn = 0  # batches that `_live` has yielded
        self._kept: list[_Kept] = []  # those since the mark: the last `len(_kept)` of `_drawn`
        self._state = LoaderState(0)
        self._rewound = False

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") or name in ("state_dict", "load_state_dict", "_loader"):
            raise AttributeError(name)
        return getattr(self._loader, name)

    def __len__(self) -> int:
        return len(self._loader)

    @property
    def position(self) -> int:
        """Batches yielded in this iteration."""
        return self._state.batches

    def state(self, back: int = 0) -> LoaderState:
        """Where the loader stands, or stood ``back`` batches ago; no further back than the mark."""
        back = min(back, self.position, len(self._kept))
        if self._state.begun is None:
            return self.state_between_epochs()
        if not back:
            return self._state._replace(before=())
        first = len(self._kept) + self.position - back - self._drawn
        before = () if self._workers else tuple(kept.random for kept in self._kept[first : first + back])
        return self._kept[first].before._replace(before=before)

    def state_between_epochs(self) -> LoaderState:
        """What outlives an epoch."""
        return LoaderState(0, None, _state_of(self._generator), self._lasting(self._state))

    def begin_epoch(self, epoch: int) -> None:
        """Says which epoch the next iteration belongs to."""
        self._epoch = epoch

    def mark(self, ahead: int = 0) -> None:
        """A window begins here, ``ahead`` batches ago: earlier ones will not be asked for again."""
        needed = self._drawn - self.position + min(ahead, self.position)
        self._kept = self._kept[max(0, len(self._kept) - needed) :]

    def rewind(self, epoch: int, state: LoaderState) -> None:
        """Makes the next iteration begin at ``state`` of ``epoch``.

        Call it before the random state is put back: starting a loader draws from the generators.
        """
        self.begin_epoch(epoch)
        first = self._drawn - len(self._kept)
        live = self._live is not None and (self._live_epoch, self._state.begun) == (epoch, state.begun)
        self._state = state
        if not live or not first <= state.batches <= self._drawn:
            self._live = None  # one that has not begun does so with the first batch, and draws then, as it always does
            if state.begun is not None or state.batches:
                self._start()
            else:
                _set_state(self._generator, state.generator)
        self._rewound = True

    def inherit(self, state: LoaderState) -> None:
        """Takes what `state_between_epochs` has returned."""
        self._state, self._live = LoaderState(0, workers=state.workers), None
        _set_state(self._generator, state.generator)

    def close(self) -> None:
        """Ends workers; left to the garbage collector, they take seconds."""
        self._live, self._kept, self._drawn = None, [], 0

    def __iter__(self) -> Iterator[Any]:
        if self._rewound:
            self._rewound = False
        else:
            self._live = None
            self._state = LoaderState(0, workers=self._lasting(self._state))
        return self._batches()

    def _batches(self) -> Iterator[Any]:
        if self._live is None:
            self._start()
        while True:
            if self.position < self._drawn:
                kept = self._kept[self.position - self._drawn]
                self._set_rng_state(kept.after)
            else:
                if not self._draw():
                    return
                kept = self._kept[-1]
            self._state = self._after(kept)
            yield kept.batch

    def _draw(self) -> bool:
        """Adds the next batch that has not been drawn yet to what is kept; False if there is none."""
        before = self._state
        if before.before:
            self._set_rng_state(before.before[0])
        random = self._rng_state()
        item: Any = next(self._live, _END) if self._live is not None else _END
        if item is _END:
            return False
        batch, reported = item if self._random is not None else (item, None)
        self._drawn += 1
        self._kept.append(_Kept(batch, before, random, reported, self._rng_state()))
        return True

    def _after(self, kept: _Kept) -> LoaderState:
        """Where the loader stands after a batch."""
        state = kept.before
        workers = state.workers
        if kept.reported is not None:
            known = list(workers)
            known[state.batches % len(known)] = kept.reported
            workers = tuple(known)
        return state._replace(batches=state.batches + 1, workers=workers, before=state.before[1:])

    def _start(self) -> None:
        """Starts the loader and goes to where `_state` says, with nothing kept."""
        state, drop = self._state, self._state.batches
        if state.begun is None:
            state = state._replace(reused=bool(state.workers))
        else:
            self._set_rng_state(state.begun)
            _set_state(self._generator, state.generator)
        if self._random is not None:
            self._random.start = state.workers
            if state.begun is not None:
                forget_workers(self._loader)
            state = state._replace(workers=state.workers or (None,) * self._workers)
        self._state = state._replace(begun=self._rng_state(), generator=_state_of(self._generator))
        if self._skipping is not None:
            drop = state.batches % max(1, self._workers)
            self._skipping.skip, self._skipping.blanks = state.batches - drop, drop
        with self._no_seed() if state.reused else nullcontext():
            self._live = iter(self._loader)
        if self._skipping is not None:
            self._skipping.advance()
        for _ in range(drop):
            next(self._live, _END)
        self._live_epoch, self._drawn, self._kept = self._epoch, state.batches, []

    @contextmanager
    def _no_seed(self) -> Iterator[None]:
        """Workers that are started inside draw their seed from elsewhere: those that they stand for drew none."""
        generator, self._loader.generator = self._loader.generator, torch.Generator()
        try:
            yield
        finally:
            self._loader.generator = generator

    def _equip(self, loader: DataLoader[Any]) -> DataLoader[Any]:
        """A copy of ``loader``, for it is the user's own, that can skip and whose workers report."""
        loader = copy.copy(loader)
        self._skipping = _SkippingBatchSampler(loader.batch_sampler)
        # DataLoader.__setattr__ forbids this because its own sampler would no longer agree; ours does.
        object.__setattr__(loader, "batch_sampler", self._skipping)
        if loader.num_workers:
            self._random = WorkerRandom(loader.collate_fn, loader.worker_init_fn, self._rng_state, self._set_rng_state)
            loader.collate_fn, loader.worker_init_fn = self._random.collate, self._random.init
        return loader

    @property
    def _workers(self) -> int:
        return getattr(self._loader, "num_workers", 0)

    @property
    def _generator(self) -> torch.Generator | None:
        generator = getattr(self._loader, "generator", None)
        return generator if isinstance(generator, torch.Generator) else None

    def _lasting(self, state: LoaderState) -> tuple[bytes | None, ...]:
        """What is known of workers that live longer than an epoch."""
        return state.workers if getattr(self._loader, "persistent_workers", False) else ()


class _SkippingBatchSampler:
    """A batch sampler whose next iteration leaves out the first batches.

    Attributes:
        skip: How many come to nothing.
        blanks: How many after those come as `BLANK`.
    """

    def __init__(self, batch_sampler: Any) -> None:
        self._batch_sampler = batch_sampler
        self._indices: Iterator[Any] = iter(())
        self.skip = self.blanks = 0

    def __getattr__(self, name: str) -> Any:
        if name == "_batch_sampler":
            raise AttributeError(name)
        return getattr(self._batch_sampler, name)

    def __len__(self) -> int:
        return len(self._batch_sampler)

    def __iter__(self) -> Iterator[Any]:
        self._indices = iter(self._batch_sampler)
        return self._rest()

    def advance(self) -> None:
        """Leaves out what the iteration that has just begun is to leave out, before anything else draws numbers."""
        skip, self.skip = self.skip, 0
        for _ in range(skip):
            next(self._indices, None)

    def _rest(self) -> Iterator[Any]:
        indices, blanks = self._indices, self.blanks
        self.advance()
        self.blanks = 0
        for _ in range(blanks):
            next(indices, None)
            yield BLANK
        yield from indices


def _can_skip(loader: Any) -> bool:
    """Whether leaving out indices leaves out batches."""
    return (
        isinstance(loader, DataLoader)
        and type(loader).__iter__ is DataLoader.__iter__
        and loader.batch_sampler is not None
        and not isinstance(loader.dataset, IterableDataset)
    )


def _state_of(generator: torch.Generator | None) -> bytes | None:
    return None if generator is None else generator.get_state().numpy().tobytes()


def _set_state(generator: torch.Generator | None, state: bytes | None) -> None:
    if generator is not None and state is not None:
        generator.set_state(torch.frombuffer(bytearray(state), dtype=torch.uint8))
