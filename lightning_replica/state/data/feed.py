"""The running iteration of a loader, which can begin at any batch."""

import atexit
import copy
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.utils.data import DataLoader, IterableDataset

from lightning_replica._compat.loading import end_workers, forget_workers
from lightning_replica.core import plain
from lightning_replica.core.inexact import Report, warn
from lightning_replica.state.data.deaths import loading
from lightning_replica.state.data.indices import Indices
from lightning_replica.state.data.loader_state import LoaderState
from lightning_replica.state.data.sources import Copied
from lightning_replica.state.data.workers import WorkerStates

END = object()
_open: "weakref.WeakSet[Feed]" = weakref.WeakSet()


class Feed:
    """Iterates a copy of the user's loader that is equipped to begin in the middle.

    The copy is made when workers are started or, without workers, when an iteration begins. So all that Lightning or
    the user has done to the loader by then takes effect, as it does without this package.

    Args:
        loader: What the user's dataloader hook returned, with all that Lightning has done to it.
        rng_state: Returns the state of all generators.
        set_rng_state: Restores such a state.
        copied: What its workers copy.
        report: Called with what is not restored exactly.

    Attributes:
        seeded: State of the generator from which the seed of workers that outlive an iteration was drawn; None if there
            are no such workers.
    """

    def __init__(
        self,
        loader: Any,
        rng_state: Callable[[], bytes],
        set_rng_state: Callable[[bytes], None],
        copied: Copied,
        report: Report = warn,
    ) -> None:
        self._loader, self._rng_state, self._set_rng_state = loader, rng_state, set_rng_state
        self._copied, self._report = copied, report
        self._equips = isinstance(loader, DataLoader) and type(loader).__iter__ is DataLoader.__iter__
        self._equipped: Any = None
        self._indices = Indices(())
        self._states: WorkerStates | None = None
        self._live: Iterator[Any] | None = None
        self.seeded: bytes | None = None

    # What kind of loader it is

    @property
    def workers(self) -> int:
        """The number of workers."""
        return self._loader.num_workers if isinstance(self._loader, DataLoader) else 0

    @property
    def skips(self) -> bool:
        """Whether a batch is skipped without loading it when its indices are left out."""
        return self._equips and not isinstance(self._loader.dataset, IterableDataset)

    @property
    def lasts(self) -> bool:
        """Whether workers outlive an iteration."""
        return bool(self._equips and self.workers and self._loader.persistent_workers)

    @property
    def keeps_unknown_workers(self) -> bool:
        """Whether workers outlive an iteration, and nothing is known of their states."""
        return not self._equips and self.workers > 0 and bool(self._loader.persistent_workers)

    @property
    def generator(self) -> torch.Generator | None:
        """The loader's own generator; None if it has none."""
        generator = getattr(self._loader, "generator", None)
        return generator if isinstance(generator, torch.Generator) else None

    # Iterations

    @property
    def is_live(self) -> bool:
        """Whether an iteration is under way."""
        return self._live is not None

    def begin(self) -> tuple[tuple[bytes | None, ...], bool]:
        """Begin the next iteration as the loader itself would.

        Returns:
            The states of the workers, and whether the workers are those of the previous iteration.
        """
        if self.lasts and self._live is not None:
            states = self.finish()
            self._live = self._start()
            return states, True
        if self._equips:
            self.close()
        self._open(())
        return (None,) * self.workers, False

    def begin_with(self, state: LoaderState, seeded: bytes) -> None:
        """Begin the next iteration with new workers in place of those of the previous iteration, as it left them."""
        self.close()
        self._open(state.workers, seeded, state_at_start=state.copied)

    def replay(self, state: LoaderState) -> None:
        """Begin an iteration in the middle.

        The generators must be in the state in which they were when the iteration began.
        """
        self.close()
        drop = state.batches
        if self.skips:
            drop = state.batches % max(1, self.workers)
        self._open(
            state.workers if self.skips or state.reused else (),
            state.seeded if state.reused else None,
            (state.batches - drop, drop) if self.skips else (0, 0),
            state.copied,
        )
        if state.first is not None:
            self._set_rng_state(state.first)
        self._indices.advance()
        for _ in range(drop):
            self.next()

    def next(self) -> Any:
        """Return the next batch, and the state of its worker if that has changed; `END` if there is none."""
        if self._live is None:
            raise RuntimeError("No iteration has begun.")
        with self._broken_if_it_raises(), loading():
            item: Any = next(self._live, END)
        if item is END:
            return END
        if self._states is None:
            return item, None
        batch, changed, packed_reports = item
        for name, why, scope in () if packed_reports is None else plain.unpack(packed_reports):
            self._report(name, why, scope)
        return batch, changed

    def finish(self) -> tuple[bytes | None, ...]:
        """End an iteration whose workers outlive it: batches that were already requested are loaded and dropped.

        Returns:
            The states of the workers.
        """
        if self._states is None:
            raise RuntimeError("There are no workers.")
        self._indices.stop()
        while self.next() is not END:
            pass
        return self._states.all()

    def close(self) -> None:
        """Shut down the workers; the garbage collector would take seconds, or for ever if a worker was stopped."""
        live, self._live, self._equipped, self._states = self._live, None, None, None
        end_workers(live)
        if not self._equips and isinstance(self._loader, DataLoader):
            forget_workers(self._loader)
        _open.discard(self)

    def _open(
        self,
        workers: tuple[bytes | None, ...],
        seeded: bytes | None = None,
        leave_out: tuple[int, int] = (0, 0),
        state_at_start: bytes | None = None,
    ) -> None:
        """Begin an iteration, with new workers.

        Args:
            workers: The states of the workers. If this is empty, or a worker's is None, the seed decides.
            seeded: State of the generator from which their seed was drawn before; None to draw a new seed.
            leave_out: How many indices to skip, and how many blanks after those.
            state_at_start: What `Copied.state_at_start` returned where these workers take the place of others.
        """
        _open.add(self)
        self.seeded = seeded
        if not self._equips:
            self._live = iter(self._loader)
            return
        self._equipped = equipped = copy.copy(self._loader)
        forget_workers(equipped)  # these would be the user's, if there are any
        name = "sampler" if equipped.batch_sampler is None else "batch_sampler"
        self._indices = Indices(getattr(equipped, name))
        self._indices.skip, self._indices.blanks = leave_out
        # DataLoader.__setattr__ forbids this, because its own sampler would no longer agree. `Indices` does agree.
        object.__setattr__(equipped, name, self._indices)
        if equipped.num_workers:
            copied = self._copied if self.skips or self.lasts else None  # other data is drawn again from its beginning
            start = workers or (None,) * equipped.num_workers
            self._states = states = WorkerStates(
                equipped, start, state_at_start, self._rng_state, self._set_rng_state, copied
            )
            equipped.worker_init_fn, equipped.collate_fn = states.init, states
        if self.lasts and seeded is None:
            self._indices.before_seed = self._note_seed
        with self._seed_from(seeded):
            self._live = self._start()

    def _start(self) -> Iterator[Any]:
        with self._broken_if_it_raises():
            return iter(self._equipped)

    def _note_seed(self) -> None:
        generator = self._equipped.generator or torch.default_generator
        self.seeded = generator.get_state().numpy().tobytes()

    @contextmanager
    def _seed_from(self, seeded: bytes | None) -> Iterator[None]:
        """Draw the seed of workers that start inside from ``seeded``: the workers that they replace drew none here."""
        if seeded is None:
            yield
            return
        equipped, self._indices.mute = self._equipped, True
        own, equipped.generator = equipped.generator, generator_at(seeded)
        try:
            yield
        finally:
            equipped.generator = own

    @contextmanager
    def _broken_if_it_raises(self) -> Iterator[None]:
        """Close the feed on any exception: torch has lost the failed batch, and would continue with the next one."""
        try:
            yield
        except BaseException:
            self.close()
            raise


def generator_at(state: bytes) -> torch.Generator:
    """Return a new generator in a given state."""
    generator = torch.Generator()
    put(generator, state)
    return generator


def put(generator: torch.Generator, state: bytes) -> None:
    """Set a generator to a former state."""
    generator.set_state(torch.frombuffer(bytearray(state), dtype=torch.uint8))


@atexit.register
def _close_all() -> None:
    """Shut down all workers, before multiprocessing waits for every child, including those that were stopped."""
    for feed in tuple(_open):
        feed.close()
