"""Ranks that do something together, and fail together."""

import time
from collections.abc import Callable
from typing import Any, TypeVar

import torch.distributed as dist

from lightning_replica import plain
from lightning_replica.checkpoint.contents import StateInfo, TensorInfo
from lightning_replica.checkpoint.manifest import FileInfo
from lightning_replica.errors import CheckpointError
from lightning_replica.sharding.collectives import all_gather_bytes

T = TypeVar("T")
_SENT = (FileInfo, StateInfo, TensorInfo)
_POLL_S = 0.01


class Together:
    """The ranks that save or load one checkpoint.

    Args:
        group: Their process group; None is the default one, or this process alone where there is none.

    Attributes:
        rank: This process's rank in the group. Rank 0 writes what is written once.
        size: Ranks of the group.
    """

    def __init__(self, group: dist.ProcessGroup | None) -> None:
        self.group = group
        alone = not (dist.is_available() and dist.is_initialized())
        self.rank = 0 if alone else dist.get_rank(group)
        self.size = 1 if alone else dist.get_world_size(group)

    def all(self, work: Callable[[], T]) -> list[T]:
        """Calls ``work`` on every rank and gives every rank all results. Collective; also a barrier.

        Raises:
            CheckpointError: On every rank, if ``work`` raised on any.
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
        """What each rank has given."""
        group: Any = self.group or dist.group.WORLD
        return all_gather_bytes(payload, group, lambda: None)

    def run(self, work: Callable[[], T]) -> T:
        """Like `all`, for a result that is nobody else's business."""
        mine: list[T] = []
        self.all(lambda: mine.append(work()))
        return mine[0]


class TogetherBeside(Together):
    """The same over a store, for a thread beside the one that uses the process groups.

    Args:
        store: A connection of its own: a store client serves one thread at a time.
        topic: Begins the keys; used once.
        rank: This process's rank.
        size: Ranks.
        check: Called while it waits; raises if the others will not come any more.

    Attributes:
        waits: Whether it waits for other ranks.
    """

    def __init__(self, store: dist.Store, topic: str, rank: int, size: int, check: Callable[[], None]) -> None:
        self.group = None
        self.rank, self.size = rank, size
        self._store, self._topic, self._check = store, topic, check
        self._given: list[str] = []
        self.waits = False

    def _exchange(self, payload: bytes) -> list[bytes]:
        keys = [f"{self._topic}/{len(self._given)}/{rank}" for rank in range(self.size)]
        self._store.set(keys[self.rank], payload)  # type: ignore[arg-type]  # bytes, as `get` returns them
        self.waits = True
        while not self._store.check(keys):
            self._check()
            time.sleep(_POLL_S)
        self.waits = False
        if self._given:
            self._store.delete_key(self._given[-1])  # everyone is in this round, and has read the one before
        self._given.append(keys[self.rank])
        return [self._store.get(key) for key in keys]
