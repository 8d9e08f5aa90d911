"""Random numbers drawn inside DataLoader workers, such as augmentations: where they stand travels with each batch.

A worker's generators are seeded when it starts and then run through all batches that it loads. A loader that begins in
the middle of an epoch without loading what came before must set them, so every worker reports them with its batches:
nothing where a batch drew nothing, some kilobytes where it did.
"""

from collections.abc import Callable
from typing import Any

# In place of a batch of indices: loads nothing, but gives the next batch to the next worker.
BLANK: list[Any] = []


class WorkerRandom:
    """Wraps what a DataLoader calls in its workers.

    Args:
        collate: The loader's ``collate_fn``.
        init: The loader's ``worker_init_fn``.
        rng_state: Returns the state of all generators.
        set_rng_state: Puts them back.

    Attributes:
        start: What workers that are started from now on begin with, by worker; None leaves one as it is seeded.
    """

    def __init__(
        self,
        collate: Callable[[Any], Any],
        init: Callable[[int], Any] | None,
        rng_state: Callable[[], bytes],
        set_rng_state: Callable[[bytes], None],
    ) -> None:
        self._collate, self._init = collate, init
        self._rng_state, self._set_rng_state = rng_state, set_rng_state
        self.start: tuple[bytes | None, ...] = ()
        self._known = b""

    def init(self, worker: int) -> None:
        """In a worker, before its first batch."""
        if self._init is not None:
            self._init(worker)
        state = self.start[worker] if self.start else None
        if state is not None:
            self._set_rng_state(state)
        self._known = self._rng_state()

    def collate(self, samples: list[Any]) -> tuple[Any, bytes | None]:
        """In a worker: a batch, and the state of the generators after it if it has changed."""
        if not samples:
            return None, None
        batch = self._collate(samples)
        state = self._rng_state()
        changed = state != self._known
        self._known = state
        return batch, state if changed else None
