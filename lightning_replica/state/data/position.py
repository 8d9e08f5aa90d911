"""A loader that can be put back to any position of its epoch.

[Note: position]
The position is the number of batches that the loop has taken in this iteration. The order of samples must be a function
of seed, epoch, rank and world, as with ``DistributedSampler``; or of the random state in which the iteration began, as
with ``RandomSampler``; or of what the user's own sampler, or another source of the
user's, kept at that time (sources.py). There are two ways back. A
rank that was there keeps the batches since the last mark and yields them again. After each one it restores the random
state in which loading that batch left the generators, because loading may draw random numbers. A new process, or a rank
that has already begun another iteration or whose loader has raised, starts the loader again from the random state in
which it was started (a DataLoader draws the seed of its workers from it), and skips:

- data with a length, in a DataLoader: indices are drawn and dropped, and no skipped sample is loaded. Workers continue
  with their generators and their copies of the dataset as they were (workers.py), and every batch is loaded by the
  worker that would have loaded it;
- iterable data, and loaders that are no DataLoader or iterate in their own way: batches are loaded and dropped. Workers
  load them, too, and so draw the right random numbers by themselves.

The workers of ``persistent_workers=True`` draw their seed once, and continue from iteration to iteration. Workers that
replace them draw no seed: they are given the seed, and the states in which the iteration began.

[Note: as without us]
An iteration begins where Lightning calls ``iter``. Under every strategy, the first iteration of a fit begins before
hooks like ``on_train_start`` are called, and before ``set_epoch``. Loading draws the same random numbers, in the same
order, as without this package. Lightning and the user see their own loaders (``trainer.train_dataloader``), which
iterate independently: only the loops get this one.

[Note: faults of a loader]
Any exception of a loader (a worker was killed, a sample could not be read, a time-out, an error while pinning) ends its
iteration for good, because torch has taken the item off its queue. The rank recovers as from any exception of its own,
and the loader starts again at the batch that was to come. A validation is repeated from its beginning.

[Note: what is not exact]
Of what a dataset changes while loading (a generator, a counter, a cache), what is large starts anew, and is reported
by name. Iterable data without workers that fills a shuffle buffer with the global generators draws other numbers while
it skips; give it a generator of its own, or a worker. ``in_order=False`` gives up the order in any case.
"""

import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from torch import Tensor

from lightning_replica._compat.lightning_names import _set_sampler_epoch
from lightning_replica._compat.torch import write_count
from lightning_replica.core.inexact import Report, warn
from lightning_replica.recovery.diagnosis import worker_died
from lightning_replica.state.atoms import ATOMS
from lightning_replica.state.data.feed import END, Feed, put
from lightning_replica.state.data.loader_state import LoaderState
from lightning_replica.state.data.sources import (
    NO_TRAINING,
    Copied,
    Sources,
    TrainingObjects,
    copied_by_workers,
    sources_of,
)
from lightning_replica.state.data.workers import used_weights
from lightning_replica.state.objects.kinds import has_attributes

log = logging.getLogger(__name__)

_PARTS = ("dataset", "sampler", "batch_sampler", "collate_fn", "worker_init_fn")  # of a DataLoader; code may set them
_LOOKED_AT = 4096  # objects in a batch: one may lead to the whole dataset
_TRIES = 3  # restarts of a loader whose workers die before training

__all__ = ["ExactLoader", "LoaderState"]


class _Kept(NamedTuple):
    """A batch that may be asked for again.

    Attributes:
        batch: The batch.
        before: The state of the loader before the batch.
        random: Random state of this process before the batch, if it was the first of its iteration and no worker loads.
        reported: The state that the worker has reported with the batch; None if it has reported none.
        after: Random state of this process after the batch was loaded.
        left: What the sources kept then, if skipped batches are not loaded.
        tensors: The tensors of the batch, with how often torch had counted writes to each by then.
    """

    batch: Any
    before: LoaderState
    random: bytes
    reported: bytes | None
    after: bytes
    left: bytes | None
    tensors: list[tuple[Tensor, int]]

    def is_written(self) -> bool:
        """Return whether code has written to the batch since, as by ``x.div_(255)`` or ``batch.x = batch.x / 255``."""
        now = _tensors_in(self.batch)
        same = (a is b and count == before for (a, count), (b, before) in zip(now, self.tensors, strict=False))
        return len(now) != len(self.tensors) or not all(same)


def _tensors_in(batch: Any) -> list[tuple[Tensor, int]]:
    """Return the tensors in the containers and in the attributes of a batch, with torch's counts of writes to them."""
    found, ahead, left = list[tuple[Tensor, int]](), [batch], _LOOKED_AT
    while ahead and left:
        value, left = ahead.pop(), left - 1
        if isinstance(value, Tensor):
            found.append((value, write_count(value)))
        elif isinstance(value, Mapping):
            ahead += value.values()
        elif isinstance(value, (list, tuple)):
            ahead += value
        elif type(value) not in ATOMS:
            ahead += vars(value).values() if has_attributes(value) else ()
    return found


class ExactLoader:
    """Stands in for a dataloader in Lightning's loops. See [Note: as without us].

    Args:
        loader: What the user's dataloader hook returned, with its distributed sampler.
        rng_state: Returns the state of all generators.
        set_rng_state: Restores such a state.
        report: Called with what is not restored exactly.
        former: The loaders of the epoch before, which may have the same dataset: what it kept when the fit began is
            what a replacement finds in it.
        training: What the training consists of beside its data.

    Attributes:
        loader: The same dataloader.
    """

    def __init__(
        self,
        loader: Any,
        rng_state: Callable[[], bytes],
        set_rng_state: Callable[[bytes], None],
        report: Report = warn,
        former: "Sequence[ExactLoader]" = (),
        training: TrainingObjects = NO_TRAINING,
    ) -> None:
        self.loader = loader
        self._rng_state, self._set_rng_state, self._report = rng_state, set_rng_state, report
        changed = dict(item for each in former for item in each.changed_by_loading.items())
        self._sources = Sources(sources_of(loader), report, training, changed)
        copied = copied_by_workers(loader)
        known = [each._copied for each in former if each._copied.are(copied)]
        self._copied: Copied = known[0] if known else Copied(copied, report, training)
        self._feed = Feed(loader, rng_state, set_rng_state, self._copied, report)
        self._made_of = {name: getattr(loader, name, None) for name in _PARTS}
        self._tries = _TRIES
        self._state = LoaderState(0)
        self._drawn = 0  # batches that the feed has yielded
        self._kept: list[_Kept] = []  # batches since the mark: the last `len(_kept)` of `_drawn`
        self._ended = self._rewound = False
        self._inherited: LoaderState | None = None  # the state of an iteration whose workers have to be started again
        self._final: tuple[bytes | None, ...] | None = None  # states of workers that have finished their work

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_") or name in ("state_dict", "load_state_dict", "loader"):
            raise AttributeError(name)
        return getattr(self.loader, name)

    def __len__(self) -> int:
        return len(self.loader)

    @property
    def position(self) -> int:
        """The number of batches yielded in this iteration."""
        return self._state.batches

    def leave_deaths_to_recovery(self) -> None:
        """Raise from now on if a worker dies; before training no recovery runs, so the loader restarts by itself."""
        self._tries = 0

    # Where it stands

    @property
    def has_begun(self) -> bool:
        """Whether an iteration has begun."""
        return self._state.begun is not None

    def state(self) -> LoaderState:
        """Return the state of the loader."""
        return self._state if self.has_begun else self.state_between()

    def state_between(self) -> LoaderState:
        """Return what the next iteration takes over from one that has ended."""
        if self._inherited is not None:
            return self._inherited
        state = self._state
        if not self._feed.lasts or state.begun is None:
            return LoaderState(0, None, self._generator_state(), turn=state.turn, sources=self._sources.state())
        workers = self._final_workers()
        if workers is None:  # the workers are still loading; workers that replace them have to load, too
            return state
        between = LoaderState(0, None, self._generator_state(), turn=state.turn, sources=self._sources.state())
        return between._replace(workers=workers, seeded=state.seeded, copied=state.copied)

    def with_content(self, state: LoaderState, window: bool) -> LoaderState:
        """Add to a state what the dataset keeps in this process, which hooks may change between two batches.

        Args:
            state: The state.
            window: Whether a window of batches begins. In the middle of a step, less of what is large is compared.
        """
        for name, made in self._made_of.items():
            if getattr(self.loader, name, None) is not made:
                why = "code has put another one in its place; it does not go back, and a replacement has the former one"
                self._report(f"{name} of the loader", why)
        changing = self._changing()
        return state if changing is None else state._replace(content=changing.state(window))

    def put_content(self, state: LoaderState) -> None:
        """Restore what `with_content` has added. Called when the loader has gone where it goes."""
        changing = self._changing()
        if changing is not None and state.content != changing.state():
            changing.put(state.content)

    def _changing(self) -> Sources | None:
        """Return what hooks may change and can be restored; not iterable data, whose iteration goes on by itself."""
        if self._feed.workers:
            return self._copied
        return self._sources if self._feed.skips else None

    def _final_workers(self) -> tuple[bytes | None, ...] | None:
        """Return the states of workers that have finished their work; None while they have not."""
        if self._feed.skips:
            return self._state.workers if self._is_at_the_end() else None
        if self._final is None and self._feed.is_live and self._is_at_the_end():
            self._final = self._feed.finish()
        return self._final

    def _is_at_the_end(self) -> bool:
        length = self._length()
        return self._ended or (length is not None and self.position >= length)

    # Going elsewhere

    def mark(self, state: LoaderState | None = None) -> None:
        """Drop the batches before ``state``, or before the next one: nobody will ask for them again."""
        state = state or self._state
        first = state.batches if self._is_in(state) else 0
        self._kept = self._kept[max(0, first - self._drawn + len(self._kept)) :]

    def _is_in(self, state: LoaderState) -> bool:
        """Return whether the iteration that is under way is that of ``state``."""
        return (self._state.turn, self._state.begun) == (state.turn, state.begun)

    def rewind(self, state: LoaderState) -> None:
        """Make the next iteration begin at ``state``.

        Call this before the random state is restored, because starting a loader draws from the generators.
        """
        first = self._drawn - len(self._kept)
        live = self._is_in(state) and self._feed.is_live and first <= state.batches <= self._drawn
        # A batch that code has written to is loaded again.
        live = live and not any(kept.is_written() for kept in self._kept[state.batches - first :])
        self._state, self._rewound, self._ended = state, True, False
        if not live:
            self._forget()
            if state.begun is not None or state.batches:
                self._replay()
            else:  # an iteration that has not begun begins with its first batch
                self._put_generator(state.generator)
                self._sources.put(state.sources)

    def inherit(self, state: LoaderState) -> None:
        """Continue from what `state_between` has returned, in another process or in this one."""
        self._forget()
        self._state, self._rewound = state, False
        if state.seeded is not None:
            self._inherited = state
        if state.begun is None:
            self._put_generator(state.generator)
            self._sources.put(state.sources)

    def return_to(self, state: LoaderState) -> None:
        """Continue from what `state_between` has returned in this process; keep workers that were not used since."""
        if self._inherited is None and state.turn == self._state.turn:
            if not self._feed.lasts:
                self._put_generator(state.generator)
                return
            if self._feed.is_live:
                return
        self.inherit(state)

    def close(self) -> None:
        """Shut down the workers."""
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
        """Return the next batch.

        Raises:
            StopIteration: If there is none.
        """
        if self.position < self._drawn:
            kept = self._kept[self.position - self._drawn]
            self._set_rng_state(kept.after)
            if self._changing() is self._sources and kept.left != self._sources.state(begins=False):
                self._sources.put(kept.left)
        else:
            kept = self._draw()
        self._state = self._after(kept)
        return kept.batch

    @property
    def changed_by_loading(self) -> Mapping[str, frozenset[str]]:
        """What loading was seen to change of the training's objects and in variables; see `Sources`."""
        return self._sources.changed_by_loading

    def _draw(self) -> _Kept:
        """Load the next batch that has not been drawn yet, and keep it."""
        if not self._feed.is_live:
            self._begin_late()
        before = self._state
        if not before.batches and not self._feed.workers:
            before = before._replace(epoch=self._sampler_epoch())
        random = b"" if before.batches or self._feed.workers else self._rng_state()
        self._report_changed_between_batches()
        with self._sources.loading():
            item = self._next()
        if item is END:
            self._ended = True
            raise StopIteration
        self._report_changed_by_loading()
        if self._changing() is None:
            self._sources.note_loaded()
        left = self._sources.state(begins=False) if self._feed.skips else None
        kept = _Kept(item[0], before, random, item[1], self._rng_state(), left, _tensors_in(item[0]))
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
                log.warning("%s. Its loader starts again.", error)
            left -= 1
            self._replay_beside()

    def _after(self, kept: _Kept) -> LoaderState:
        """Return the state of the loader after a batch."""
        state = kept.before
        workers = state.workers
        if kept.reported is not None and self._feed.skips:
            known = list(workers)
            known[state.batches % len(known)] = kept.reported
            workers = tuple(known)
        first = state.first if state.batches or self._feed.workers else kept.random
        return state._replace(batches=state.batches + 1, workers=workers, first=first, left=kept.left)

    def _begin(self) -> None:
        """Begin the next iteration."""
        inherited, self._inherited = self._inherited, None
        turn = self._state.turn + 1
        if turn > 1 and self._feed.keeps_unknown_workers:
            why = "its class iterates in its own way, and its persistent workers start anew where a rank is replaced"
            self._report("the loader", why, "replacement")
        if inherited is not None and inherited.begun is not None:
            self._replay_beside()
        begun, generator, sources = self._rng_state(), self._generator_state(), self._sources.state()
        self._kept, self._drawn, self._ended, self._final = [], 0, False, None
        self._sources.begin_to_load()
        copied = self._copied.state_at_start()
        if inherited is not None and inherited.begun is None and inherited.seeded is not None:
            workers, reused, copied = inherited.workers, True, inherited.copied
            with self._copied.holding(copied):
                self._feed.begin_with(inherited, inherited.seeded)
        else:
            workers, reused = self._feed.begin()
            copied = self._state.copied if reused else copied
        epoch = self._sampler_epoch() if self._feed.workers else None
        state = LoaderState(0, begun, generator, workers, reused, turn, epoch, seeded=self._feed.seeded)
        self._state = state._replace(sources=sources, copied=copied, length=self._length())

    def _begin_late(self) -> None:
        """Begin if nobody has called ``iter``, or start again if a caller has caught what the loader raised."""
        if self._state.begun is None:
            self._begin()
        else:
            self._replay_beside()

    def _replay_beside(self) -> None:
        """Start the loader again at `_state`; this leaves the global generators and the sampler's epoch as they are."""
        random, epoch = self._rng_state(), self._sampler_epoch()
        self._replay()
        self._set_rng_state(random)
        if epoch is not None:
            _set_sampler_epoch(self.loader, epoch)

    def _replay(self) -> None:
        """Start the loader again at `_state`, with no batch kept."""
        state = self._state
        self._sources.begin_to_load()
        if state.begun is None:
            state = state._replace(
                begun=self._rng_state(), generator=self._generator_state(), copied=self._copied.state_at_start()
            )
        else:
            self._set_rng_state(state.begun)
            self._put_generator(state.generator)
            self._sources.put(state.sources)
            self._compare_length(state)
            if used_weights(state.workers):
                why = "it is made with weights of the model, and workers that start again have those of now"
                self._report("the data of the loader", why, "once")
        self._state = state = state._replace(workers=state.workers or (None,) * self._feed.workers)
        if state.epoch is not None:
            _set_sampler_epoch(self.loader, state.epoch)
        self._kept, self._drawn = [], state.batches
        if self._feed.workers and state.content is not None:  # before workers look at memory that they share with it
            self._copied.put(state.content)
        with self._copied.holding(state.copied):
            self._feed.replay(state)
        self._sources.put(state.left)

    def _report_changed_by_loading(self) -> None:
        """Report what changes with each batch that is loaded and does not go with the position of iterable data."""
        if self._changing() is not self._sources:
            for owner, names in self._sources.changed_by_loading.items():
                for name in sorted(names):
                    self._report(
                        f"{owner}.{name}", "loading data changes it, and a batch that comes again is not loaded again"
                    )

    def _report_changed_between_batches(self) -> None:
        """Report what code changes in iterable data while that is iterated: it does not go back."""
        if self._changing() is not None:
            return
        for name in self._sources.changed_since_loaded():
            why = (
                "code changes it between two batches of data that has no length and no workers. It does not go back,"
                " and a replacement begins the iteration with what it is then. Change it where an epoch begins"
            )
            self._report(name, why)

    def _compare_length(self, state: LoaderState) -> None:
        """Report that this process draws from other data than the one that was in the middle of them."""
        now = self._length()
        if None not in (now, state.length) and now != state.length:
            why = f"it has {now} batches here, and had {state.length} where the epoch was begun"
            self._report("the data of the loader", why, "once")

    def _length(self) -> int | None:
        try:
            return len(self.loader)
        except (TypeError, NotImplementedError):
            return None

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
    """An iterator that an exception does not end."""

    def __init__(self, take: Callable[[], Any]) -> None:
        self._take = take

    def __iter__(self) -> Iterator[Any]:
        return self

    def __next__(self) -> Any:
        return self._take()
