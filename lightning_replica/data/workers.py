"""The part of a loader that runs inside its workers.

[Note: workers]
A worker's generators are seeded when it starts and then run through all batches that it loads: augmentations draw from
them. A loader that begins in the middle of an epoch without loading what came before must set them, so every worker
reports them with its batches: nothing where a batch drew nothing, some kilobytes where it did. Workers that live
longer than an epoch (``persistent_workers=True``) load on until what was handed out is done, and may draw where
iterable data ends; no batch would bring that. They write it into a book in shared memory, which is read before the next
epoch begins.

A worker looks after its parent only while it waits for indices. So the kernel is told to end it with its rank, busy or
stopped.
"""

from collections.abc import Callable
from typing import Any

import torch

from lightning_replica._compat.loading import take_part_in_fetching
from lightning_replica.data.indices import Blank
from lightning_replica.launch.orphans import end_with_parent


class WorkerRandom:
    """Takes part in what workers do; in place of the loader's ``collate_fn``, and its ``init`` of ``worker_init_fn``.

    Args:
        loader: The user's loader.
        start: What workers begin with, by worker; None leaves one as it is seeded.
        rng_state: Returns the state of all generators.
        set_rng_state: Puts them back.
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
        """In the rank, while workers that live longer have nothing to do: where each of them stands."""
        if self._book is None:
            raise RuntimeError("Workers that end with the epoch keep no book.")
        written = [row.numpy().tobytes() for row in self._book]
        return tuple(row[1:] if row[0] else start for row, start in zip(written, self._start, strict=True))

    def init(self, worker: int) -> None:
        """In a worker, before its first batch."""
        end_with_parent()
        if self._init is not None:
            self._init(worker)
        state = self._start[worker]
        if state is not None:
            self._set_rng_state(state)
        self._worker, self._known = worker, self._rng_state()
        take_part_in_fetching(self, self._collate, lambda fetcher: _Reporting(fetcher, self))

    def changed(self) -> bytes | None:
        """In a worker: the state of the generators, if it is another one than before."""
        state = self._rng_state()
        if state == self._known:
            return None
        self._known = state
        if self._book is not None:
            self._book[self._worker, 1:] = torch.frombuffer(bytearray(state), dtype=torch.uint8)
            self._book[self._worker, 0] = 1
        return state


class _Reporting:
    """One of torch's fetchers, whose batches come with what `WorkerRandom.changed` says after them."""

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
