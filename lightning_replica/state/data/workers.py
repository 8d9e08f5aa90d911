"""The part of a loader that runs inside its workers.

[Note: workers]
A worker's generators are seeded when it starts, and then used for all batches that it loads: augmentations draw from
them. Its copy of the dataset may change with each batch: an augmentation has a generator of its own. A loader that
begins in the middle of an epoch without loading the earlier batches must restore both. So every worker reports their
state with its batches: nothing if a batch drew and changed nothing, some kilobytes if it did. Workers
that outlive an epoch (``persistent_workers=True``) continue until they have loaded what was requested, and may draw
when iterable data ends. No batch would report that. So they write their state into a book in shared memory, which the
rank reads before the next epoch begins.

Workers that have copies of the model (``collate_fn=self.collate``) may compute with its weights, which are those of the
time when they started. Whether they do is part of their state: a worker that takes the place of another has later ones.

A worker checks whether its parent is alive only while it waits for indices. So the kernel is asked to end the worker
with its rank, even if the worker is busy or stopped.
"""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Final

import torch
from torch import nn
from torch.overrides import TorchFunctionMode
from torch.utils.data import get_worker_info

from lightning_replica._compat.loading import take_part_in_fetching
from lightning_replica.core import plain
from lightning_replica.core.orphans import end_with_parent
from lightning_replica.state.data.indices import Blank
from lightning_replica.state.data.sources import SENT_BYTES, Copied

_HEAD_BYTES: Final = 8  # of a row in the book: the size of the state


class WorkerStates:
    """Sets and reports states in workers; replaces ``collate_fn``, and with ``init`` the ``worker_init_fn``.

    Args:
        loader: The user's loader.
        start: The state that each worker begins with; None leaves a worker as it is seeded.
        state_at_start: What `Copied.state_at_start` returned, if these workers take the place of others.
        rng_state: Returns the state of all generators.
        set_rng_state: Restores such a state.
        copied: What workers copy; None if it need not be followed.
    """

    def __init__(
        self,
        loader: Any,
        start: tuple[bytes | None, ...],
        state_at_start: bytes | None,
        rng_state: Callable[[], bytes],
        set_rng_state: Callable[[bytes], None],
        copied: Copied | None,
    ) -> None:
        self._init, self._collate = loader.worker_init_fn, loader.collate_fn
        self._rng_state, self._set_rng_state = rng_state, set_rng_state
        self._follows, self._copied = copied is not None, copied
        self._start, self._state_at_start = start, state_at_start
        self._book: torch.Tensor | None = None
        if loader.persistent_workers:
            most = _HEAD_BYTES + 2 * len(plain.pack((rng_state(), None, False))) + SENT_BYTES
            self._book = torch.zeros(loader.num_workers, most, dtype=torch.uint8).share_memory_()
        self._weights = _Weights() if copied is not None and copied.has_weights else None
        self._worker, self._known = 0, b""

    def __getstate__(self) -> dict[str, Any]:
        """Return what a worker is sent that is not forked; it finds itself what it has copied."""
        return {**vars(self), "_copied": None}

    def all(self) -> tuple[bytes | None, ...]:
        """Return the states of workers that outlive an epoch; called in the rank, while the workers are idle."""
        if self._book is None:
            raise RuntimeError("Workers that end with the epoch do not record their states.")
        written = [row.numpy().tobytes() for row in self._book]
        sizes = [int.from_bytes(row[:_HEAD_BYTES], "little") for row in written]
        return tuple(
            row[_HEAD_BYTES:][:size] if size else start
            for row, size, start in zip(written, sizes, self._start, strict=True)
        )

    def init(self, worker: int) -> None:
        """Prepare a worker; called in the worker, before its first batch."""
        end_with_parent()
        state = self._start[worker]
        if self._copied is not None:  # it is a fork of the rank's process
            self._copied.put_variables(self._state_at_start)
            if state is not None:
                self._copied.return_to_beginning()
        if self._init is not None:
            self._init(worker)
        if self._follows:
            self._follow()
        if state is not None:
            random, changed, _ = plain.unpack(state)
            if self._copied is not None:
                self._copied.put_in_worker(changed)
            self._set_rng_state(random)
        self._worker, self._known = worker, self._state() if state is not None else self._packed(None)
        take_part_in_fetching(self, self._collate, lambda fetcher: _Reporting(fetcher, self))

    def _follow(self) -> None:
        info = get_worker_info()
        own = [info.dataset, self._collate, self._init]  # type: ignore[union-attr]
        if self._copied is None:  # it has not been forked, so all is as its own imports and pickle have made it
            self._copied = Copied({id(each): each for each in own if each is not None}.values())
        self._copied.begin_in_worker()

    def _state(self) -> bytes:
        return self._packed(None if self._copied is None else self._copied.state_in_worker())

    def _packed(self, changed: bytes | None) -> bytes:
        return plain.pack((self._rng_state(), changed, self._weights is not None and self._weights.were_used))

    def watching(self) -> AbstractContextManager[Any]:
        """Find out in the block whether weights are used."""
        return self._weights or nullcontext()

    def changed(self) -> bytes | None:
        """Return the state if it has changed, None if it has not; called in a worker."""
        state = self._state()
        if state == self._known:
            return None
        self._known = state
        if self._book is not None:
            row = self._book[self._worker].numpy()
            row[_HEAD_BYTES : _HEAD_BYTES + len(state)] = bytearray(state)
            row[:_HEAD_BYTES] = bytearray(len(state).to_bytes(_HEAD_BYTES, "little"))
        return state

    def packed_reports(self) -> bytes | None:
        """Return, packed, what was found since the last call not to be restored exactly; None if nothing was."""
        found = [] if self._copied is None else self._copied.reports()
        return plain.pack(found) if found else None


def used_weights(workers: Sequence[bytes | None]) -> bool:
    """Return whether one of these states is that of a worker that has used weights of the model."""
    return any(state is not None and plain.unpack(state)[2] for state in workers)


class _Weights(TorchFunctionMode):
    """Sees whether torch computes with weights of the model."""

    were_used = False

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if not self.were_used:
            given = [*args, *kwargs.values()]
            given += [item for each in given if isinstance(each, (list, tuple)) for item in each]
            self.were_used = any(isinstance(each, nn.Parameter) for each in given)
        return func(*args, **kwargs)


class _Reporting:
    """One of torch's fetchers, with what `WorkerStates` returns after each batch added to the batch."""

    def __init__(self, fetcher: Any, states: WorkerStates) -> None:
        self._fetcher, self._states = fetcher, states

    def fetch(self, index: Any) -> tuple[Any, bytes | None, bytes | None]:
        if isinstance(index, Blank):
            return None, None, None
        try:
            with self._states.watching():
                batch = self._fetcher.fetch(index)
        finally:
            changed = self._states.changed()
        return batch, changed, self._states.packed_reports()
