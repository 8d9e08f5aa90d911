"""The part of a loader that runs inside its workers.

[Note: workers]
A worker's generators are seeded when it starts, and then used for all batches that it loads: augmentations draw from
them. A loader that begins in the middle of an epoch without loading the earlier batches must set these generators. So
every worker reports their state with its batches: nothing if a batch drew nothing, some kilobytes if it did. Workers
that outlive an epoch (``persistent_workers=True``) continue until they have loaded what was requested, and may draw
when iterable data ends. No batch would report that. So they write their state into a book in shared memory, which the
rank reads before the next epoch begins.

A worker checks whether its parent is alive only while it waits for indices. So the kernel is asked to end the worker
with its rank, even if the worker is busy or stopped.
"""

from collections.abc import Callable
from typing import Any

import torch

from lightning_replica._compat.loading import take_part_in_fetching
from lightning_replica.core.orphans import end_with_parent
from lightning_replica.state.data.indices import Blank


class WorkerRandom:
    """Sets and reports random states in workers; replaces ``collate_fn``, and with ``init`` the ``worker_init_fn``.

    Args:
        loader: The user's loader.
        start: The random state that each worker begins with; None leaves a worker as it is seeded.
        rng_state: Returns the state of all generators.
        set_rng_state: Restores such a state.
    """

    def __init__(
        self,
        loader: Any,
        start: tuple[bytes | None, ...],
        rng_state: Callable[[], bytes],
        set_rng_state: Callable[[bytes], None],
    ) -> None:
        self._init, self._collate = loader.worker_init_fn, loader.collate_fn
        self._rng_state, self._set_rng_state = rng_state, set_rng_state
        self._start = start or (None,) * loader.num_workers
        self._book: torch.Tensor | None = None
        if loader.persistent_workers:
            self._book = torch.zeros(loader.num_workers, 1 + len(rng_state()), dtype=torch.uint8).share_memory_()
        self._worker, self._known = 0, b""

    def states(self) -> tuple[bytes | None, ...]:
        """Return the random states of workers that outlive an epoch; called in the rank, while the workers are idle."""
        if self._book is None:
            raise RuntimeError("Workers that end with the epoch do not record random states.")
        written = [row.numpy().tobytes() for row in self._book]
        return tuple(row[1:] if row[0] else start for row, start in zip(written, self._start, strict=True))

    def init(self, worker: int) -> None:
        """Prepare a worker; called in the worker, before its first batch."""
        end_with_parent()
        if self._init is not None:
            self._init(worker)
        state = self._start[worker]
        if state is not None:
            self._set_rng_state(state)
        self._worker, self._known = worker, self._rng_state()
        take_part_in_fetching(self, self._collate, lambda fetcher: _Reporting(fetcher, self))

    def changed(self) -> bytes | None:
        """Return the state of the generators if it has changed, None if it has not; called in a worker."""
        state = self._rng_state()
        if state == self._known:
            return None
        self._known = state
        if self._book is not None:
            self._book[self._worker, 1:] = torch.frombuffer(bytearray(state), dtype=torch.uint8)
            self._book[self._worker, 0] = 1
        return state


class _Reporting:
    """One of torch's fetchers, with what `WorkerRandom.changed` returns after each batch added to the batch."""

    def __init__(self, fetcher: Any, random: WorkerRandom) -> None:
        self._fetcher, self._random = fetcher, random

    def fetch(self, index: Any) -> tuple[Any, bytes | None]:
        if isinstance(index, Blank):
            return None, None
        try:
            batch = self._fetcher.fetch(index)
        finally:
            changed = self._random.changed()
        return batch, changed
