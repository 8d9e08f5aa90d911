"""Ranks that do something together, and fail together."""

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
        self._alone = not (dist.is_available() and dist.is_initialized())
        self.rank = 0 if self._alone else dist.get_rank(group)
        self.size = 1 if self._alone else dist.get_world_size(group)

    def all(self, work: Callable[[], T]) -> list[T]:
        """Calls ``work`` on every rank and gives every rank all results. Collective; also a barrier.

        Raises:
            CheckpointError: On every rank, if ``work`` raised on any.
        """
        raised: Exception | None = None
        mine: tuple[T | None, str | None]
        try:
            mine = (work(), None)
            payload = b"" if self._alone else plain.save(mine, _SENT)
        except Exception as error:
            raised = error
            mine = (None, str(error) if isinstance(error, CheckpointError) else f"{type(error).__name__}: {error}")
            payload = b"" if self._alone else plain.save(mine)
        everyone = [mine]
        if not self._alone:
            group: Any = self.group or dist.group.WORLD
            payloads = all_gather_bytes(payload, group, lambda: None)
            everyone = [plain.load(each, _SENT) for each in payloads]
        failures = {rank: text for rank, (_, text) in enumerate(everyone) if text is not None}
        if failures:
            same = len(set(failures.values())) == 1 and len(failures) == self.size
            texts = [failures[0]] if same else [f"rank {rank}: {text}" for rank, text in failures.items()]
            raise CheckpointError("; ".join(texts)) from raised
        return [result for result, _ in everyone]  # type: ignore[misc]

    def run(self, work: Callable[[], T]) -> T:
        """Like `all`, for a result that is nobody else's business."""
        mine: list[T] = []
        self.all(lambda: mine.append(work()))
        return mine[0]
