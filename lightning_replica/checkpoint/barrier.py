"""Ranks that work together: if one of them fails, all raise."""

import time
from collections.abc import Callable
from typing import Any, TypeVar

import torch.distributed as dist

from lightning_replica.checkpoint.boxes import Box
from lightning_replica.checkpoint.contents import Contents, OptimizerInfo, StateInfo, TensorInfo
from lightning_replica.checkpoint.manifest import FileInfo
from lightning_replica.core import plain
from lightning_replica.core.exchange import all_gather_bytes
from lightning_replica.errors import CheckpointError

T = TypeVar("T")
_SENT = (Box, Contents, FileInfo, OptimizerInfo, StateInfo, TensorInfo)
_POLL_S = 0.01


class Barrier:
    """Keeps the ranks that save or load one checkpoint together: each call returns on all of them, or raises on all.

    Args:
        group: Their process group. None means the default group, or this process alone if there is none.

    Attributes:
        rank: This process's rank in the group. Rank 0 writes everything that is written only once.
        size: Number of ranks in the group.
    """

    def __init__(self, group: dist.ProcessGroup | None) -> None:
        self.group = group
        alone = not (dist.is_available() and dist.is_initialized())
        self.rank = 0 if alone else dist.get_rank(group)
        self.size = 1 if alone else dist.get_world_size(group)

    def all(self, work: Callable[[], T]) -> list[T]:
        """Call ``work`` on every rank, and return all ranks' results on every rank. Collective, so also a barrier.

        Raises:
            CheckpointError: On every rank, if ``work`` raised on any rank.
        """
        raised: Exception | None = None
        mine: tuple[T | None, str | None]
        try:
            mine = (work(), None)
            payload = plain.save(mine, _SENT)
        except Exception as error:
            raised = error
            mine = (None, str(error) if isinstance(error, CheckpointError) else f"{type(error).__name__}: {error}")
            payload = plain.save(mine)
        everyone = [plain.load(each, _SENT) for each in self._exchange(payload)] if self.size > 1 else [mine]
        failures = {rank: text for rank, (_, text) in enumerate(everyone) if text is not None}
        if failures:
            same = len(set(failures.values())) == 1 and len(failures) == self.size
            texts = [failures[0]] if same else [f"rank {rank}: {text}" for rank, text in failures.items()]
            raise CheckpointError("; ".join(texts)) from raised
        return [result for result, _ in everyone]  # type: ignore[misc]

    def _exchange(self, payload: bytes) -> list[bytes]:
        """Return the payloads of all ranks, by rank. Collective."""
        group: Any = self.group or dist.group.WORLD
        return all_gather_bytes(payload, group, lambda: None)

    def run(self, work: Callable[[], T]) -> T:
        """Call ``work`` on every rank like `all`, but return only this rank's result. Collective."""
        mine: list[T] = []
        self.all(lambda: mine.append(work()))
        return mine[0]


class StoreBarrier(Barrier):
    """A barrier over a store, in another thread than the one that uses the process groups.

    Args:
        store: A connection for this thread only: a store client serves one thread at a time.
        topic: The prefix of the keys. No two objects may use the same.
        rank: This process's rank.
        size: Number of ranks.
        check: Called repeatedly while this rank waits. Raises if the other ranks will not come any more.

    Attributes:
        waits: Whether this rank waits for other ranks.
    """

    def __init__(self, store: dist.Store, topic: str, rank: int, size: int, check: Callable[[], None]) -> None:
        self.group = None
        self.rank, self.size = rank, size
        self._store, self._topic, self._check = store, topic, check
        self._round = 0
        self._former: list[str] = []  # what this rank has left in the store for the round before
        self.waits = False

    def _exchange(self, payload: bytes) -> list[bytes]:
        topic = f"{self._topic}/{self._round}"
        keys, come, complete = [f"{topic}/{rank}" for rank in range(self.size)], f"{topic}/come", f"{topic}/complete"
        self._store.set(keys[self.rank], payload)  # type: ignore[arg-type]  # bytes, as `get` returns them
        if self._store.add(come, 1) >= self.size:
            self._store.set(complete, "")
        self.waits = True
        for wanted in ([complete], keys):  # the latter once: a connection that breaks may have counted a rank twice
            while not self._store.check(wanted):
                self._check()
                time.sleep(_POLL_S)
        self.waits = False
        for key in self._former:  # all ranks are in this round, so they have read the one before
            self._store.delete_key(key)
        self._former = [keys[self.rank], *([come, complete] if self.rank == 0 else ())]
        self._round += 1
        return self._store.multi_get(keys)
