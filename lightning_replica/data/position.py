"""A loader that can be put back to any position of its epoch.

[Note: position]
The position is the number of batches that the loop has taken in this iteration; the order of samples must be a
function of seed, epoch, rank and world, as ``DistributedSampler`` makes it, or of the random state in which the
iteration began, as ``RandomSampler`` makes it, or of what a sampler of the user's own kept then (samplers.py). Two ways
lead back. A rank that was there keeps the batches since the last mark and yields them again, each followed by the
random state in which it left the generators, because loading may draw random numbers. A new process, or a rank that has
already begun another iteration or whose loader has raised, starts the loader again from the random state in which it
was started (a DataLoader draws the seed of its workers there) and skips:

- data with a length, in a DataLoader: indices are drawn and dropped, no skipped sample is loaded. Workers go on with
  the generators where they stood (workers.py), and every batch is loaded by the worker that would have loaded it;
- iterable data, loaders that are no DataLoader or iterate in their own way: batches are loaded and dropped, with
  workers too, whose random numbers so come out by themselves.

The workers of ``persistent_workers=True`` draw their seed once, and go on from iteration to iteration. Those that take
their place draw none: they are given the seed, and the random states in which the iteration began.

[Note: as without us]
An iteration begins where Lightning calls ``iter``: under every strategy, the first one of a fit does so before hooks
like ``on_train_start`` are called, and before ``set_epoch``. What loading draws, and in which order, is what it draws
without us. Lightning and the user see their own loaders (``trainer.train_dataloader``), which iterate on their own:
only the loops get this one.

[Note: faults of a loader]
Whatever a loader raises (a worker was killed, a sample could not be read, a time-out, an error while pinning) ends its
iteration, for good: torch has taken the item off its queue. The rank recovers as from every exception of its own, and
the loader starts again where the batch was to come. A validation is done again from its beginning.

[Note: what is not exact]
State that a dataset keeps to itself and changes while loading (a generator of its own, a counter, a cache of random
choices) is in the workers' copies of it and starts anew, but for iterable data, which is drawn again from its
beginning. Iterable data without workers that fills a shuffle buffer with the global generators draws other numbers
while it skips; give it a generator of its own, or a worker. ``in_order=False`` gives up order by itself.
"""

import logging
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

from lightning_replica._compat.lightning import _set_sampler_epoch
from lightning_replica.data.deaths import worker_died
from lightning_replica.data.feed import END, Feed, put
from lightning_replica.data.loader_state import LoaderState
from lightning_replica.data.samplers import Samplers

log = logging.getLogger(__name__)

_TRIES = 3  # of a loader whose workers die before training

__all__ = ["ExactLoader", "LoaderState"]


class _Kept(NamedTuple):
    """A batch that may be asked for again.

    Attributes:
        batch: The batch.
        before: Where the loader stood before it.
        random: Random state of this process then, if it was the first of its iteration and no worker loads.
        reported: Random state that the worker has reported with it.
        after: Random state of this process after it was loaded.
    """

    batch: Any
    before: LoaderState
    random: bytes
    reported: bytes | None
    after: bytes


class ExactLoader:
    """Stands for a dataloader in Lightning's loops. See [Note: as without us].

    Args:
        loader: What the user's dataloader hook returned, with its distributed sampler.
        rng_state: Returns the state of all generators.
        set_rng_state: Puts them back.

    Attributes:
        loader: The same.
    """

    def __init__(self, loader: Any, rng_state: Callable[[], bytes], set_rng_state: Callable[[bytes], None]) -> None:
        self.loader = loader
        self._rng_state, self._set_rng_state = rng_state, set_rng_state
        self._feed = Feed(loader, rng_state, set_rng_state)
        self._samplers = Samplers(loader)
        self._tries = _TRIES
        self._state = LoaderState(0)
        self._drawn = 0  # batches that the feed has yielded
        self._kept: list[_Kept] = []  # those since the mark: the last `len(_kept)` of `_drawn`
        self._ended = self._rewound = False
        self._inherited: LoaderState | None = None  # of an iteration whose workers are to be started anew
        self._final: tuple[bytes | None, ...] | None = None  # where workers stand once they have nothing to do

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_") or name in ("state_dict", "load_state_dict", "loader"):
            raise AttributeError(name)
        return getattr(self.loader, name)

    def __len__(self) -> int:
        return len(self.loader)

    @property
    def position(self) -> int:
        """Batches yielded in this iteration."""
        return self._state.batches

    def leave_deaths_to_recovery(self) -> None:
        """Raise if a worker dies. Before, while nobody recovers, the loader goes to where it was by itself."""
        self._tries = 0

    # Where it stands

    @property
    def has_begun(self) -> bool:
        """Whether an iteration has begun."""
        return self._state.begun is not None

    def state(self) -> LoaderState:
        """Where the loader stands."""
        return self._state if self.has_begun else self.state_between()

    def state_between(self) -> LoaderState:
        """What is left of an iteration that is over, and counts for the next one."""
        if self._inherited is not None:
            return self._inherited
        state = self._state
        if not self._feed.lasts or state.begun is None:
            return LoaderState(0, None, self._generator_state(), turn=state.turn, samplers=self._samplers.state())
        workers = self._final_workers()
        if workers is None:  # they load on; whoever takes their place does so too
            return state
        between = LoaderState(0, None, self._generator_state(), turn=state.turn, samplers=self._samplers.state())
        return between._replace(workers=workers, seeded=state.seeded)

    def _final_workers(self) -> tuple[bytes | None, ...] | None:
        """The random states of workers that have done what they were given; None while they have not."""
        if self._feed.skips:
            return self._state.workers if self._is_at_the_end() else None
        if self._final is None and self._feed.is_live and self._is_at_the_end():
            self._final = self._feed.finish()
        return self._final

    def _is_at_the_end(self) -> bool:
        try:
            return self._ended or self.position >= len(self)
        except (TypeError, NotImplementedError):
            return False

    # Going elsewhere

    def mark(self, state: LoaderState | None = None) -> None:
        """Batches before ``state``, or before the next one, will not be asked for again."""
        state = state or self._state
        first = state.batches if self._is_in(state) else 0
        self._kept = self._kept[max(0, first - self._drawn + len(self._kept)) :]

    def _is_in(self, state: LoaderState) -> bool:
        """Whether the iteration that is under way is that of ``state``."""
        return (self._state.turn, self._state.begun) == (state.turn, state.begun)

    def rewind(self, state: LoaderState) -> None:
        """Makes the next iteration begin at ``state``.

        Call it before the random state is put back: starting a loader draws from the generators.
        """
        first = self._drawn - len(self._kept)
        live = self._is_in(state) and self._feed.is_live and first <= state.batches <= self._drawn
        self._state, self._rewound, self._ended = state, True, False
        if not live:
            self._forget()
            if state.begun is not None or state.batches:
                self._replay()
            else:  # one that has not begun does so with the first batch
                self._put_generator(state.generator)
                self._samplers.put(state.samplers)

    def inherit(self, state: LoaderState) -> None:
        """Takes what `state_between` has returned, in another process or in this one."""
        self._forget()
        self._state, self._rewound = state, False
        if state.seeded is not None:
            self._inherited = state
        if state.begun is None:
            self._put_generator(state.generator)
            self._samplers.put(state.samplers)

    def return_to(self, state: LoaderState) -> None:
        """Takes what `state_between` has returned, in this process: workers that have not gone on since are kept."""
        if self._inherited is None and state.turn == self._state.turn:
            if not self._feed.lasts:
                self._put_generator(state.generator)
                return
            if self._feed.is_live:
                return
        self.inherit(state)

    def close(self) -> None:
        """Ends workers."""
        self._forget()

    def _forget(self) -> None:
        self._feed.close()
        self._kept, self._drawn = [], 0
        self._ended, self._inherited, self._final = False, None, None

    # Iterating

    def __iter__(self) -> Iterator[Any]:
        if self._rewound:
            self._rewound = False
        else:
            self._begin()
        return _Iteration(self.take)

    def take(self) -> Any:
        """The next batch.

        Raises:
            StopIteration: If there is none.
        """
        if self.position < self._drawn:
            kept = self._kept[self.position - self._drawn]
            self._set_rng_state(kept.after)
        else:
            kept = self._draw()
        self._state = self._after(kept)
        return kept.batch

    def _draw(self) -> _Kept:
        """Adds the next batch that has not been drawn yet to what is kept."""
        if not self._feed.is_live:
            self._begin_late()
        before = self._state
        if not before.batches and not self._feed.workers:
            before = before._replace(epoch=self._sampler_epoch())
        random = b"" if before.batches or self._feed.workers else self._rng_state()
        item = self._next()
        if item is END:
            self._ended = True
            raise StopIteration
        kept = _Kept(item[0], before, random, item[1], self._rng_state())
        self._kept.append(kept)
        self._drawn += 1
        return kept

    def _next(self) -> Any:
        left = self._tries
        while True:
            try:
                return self._feed.next()
            except RuntimeError as error:
                if not left or not worker_died(error):
                    raise
                log.warning("%s. Its loader begins again.", error)
            left -= 1
            self._replay_beside()

    def _after(self, kept: _Kept) -> LoaderState:
        """Where the loader stands after a batch."""
        state = kept.before
        workers = state.workers
        if kept.reported is not None and self._feed.skips:
            known = list(workers)
            known[state.batches % len(known)] = kept.reported
            workers = tuple(known)
        first = state.first if state.batches or self._feed.workers else kept.random
        return state._replace(batches=state.batches + 1, workers=workers, first=first)

    def _begin(self) -> None:
        """Begins the next iteration."""
        inherited, self._inherited = self._inherited, None
        turn = self._state.turn + 1
        if inherited is not None and inherited.begun is not None:
            self._replay_beside()
        begun, generator, samplers = self._rng_state(), self._generator_state(), self._samplers.state()
        self._kept, self._drawn, self._ended, self._final = [], 0, False, None
        if inherited is not None and inherited.begun is None and inherited.seeded is not None:
            workers, reused = inherited.workers, True
            self._feed.begin_with(workers, inherited.seeded)
        else:
            workers, reused = self._feed.begin()
        epoch = self._sampler_epoch() if self._feed.workers else None
        self._state = LoaderState(
            0, begun, generator, workers, reused, turn=turn, epoch=epoch, seeded=self._feed.seeded, samplers=samplers
        )

    def _begin_late(self) -> None:
        """Begins where nobody has called ``iter``, or where somebody has caught what the loader raised."""
        if self._state.begun is None:
            self._begin()
        else:
            self._replay_beside()

    def _replay_beside(self) -> None:
        """Goes to where `_state` says; generators and sampler stay as they are."""
        random, epoch = self._rng_state(), self._sampler_epoch()
        self._replay()
        self._set_rng_state(random)
        if epoch is not None:
            _set_sampler_epoch(self.loader, epoch)

    def _replay(self) -> None:
        """Starts the loader and goes to where `_state` says, with nothing kept."""
        state = self._state
        if state.begun is None:
            state = state._replace(begun=self._rng_state(), generator=self._generator_state())
        else:
            self._set_rng_state(state.begun)
            self._put_generator(state.generator)
            self._samplers.put(state.samplers)
        self._state = state = state._replace(workers=state.workers or (None,) * self._feed.workers)
        if state.epoch is not None:
            _set_sampler_epoch(self.loader, state.epoch)
        self._kept, self._drawn = [], state.batches
        self._feed.replay(state)

    # What it iterates

    def _sampler_epoch(self) -> int | None:
        batch_sampler = getattr(self.loader, "batch_sampler", None)
        sampler = getattr(batch_sampler, "sampler", None) or getattr(self.loader, "sampler", None)
        epoch = getattr(sampler, "epoch", None)
        return epoch if isinstance(epoch, int) else None

    def _generator_state(self) -> bytes | None:
        generator = self._feed.generator
        return None if generator is None else generator.get_state().numpy().tobytes()

    def _put_generator(self, state: bytes | None) -> None:
        if self._feed.generator is not None and state is not None:
            put(self._feed.generator, state)


class _Iteration:
    """An iterator; what it raises does not end it."""

    def __init__(self, take: Callable[[], Any]) -> None:
        self._take = take

    def __iter__(self) -> Iterator[Any]:
        return self

    def __next__(self) -> Any:
        return self._take()
