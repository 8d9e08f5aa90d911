"""The settings that decide how a state is sharded."""

from dataclasses import dataclass
from typing import Literal, TypeAlias, get_args

import torch

from lightning_replica.core import checks
from lightning_replica.core.digests import GuardMode
from lightning_replica.sharding.layout import Partition

ReduceDtype: TypeAlias = Literal["bfloat16", "float16", "float32"]
_BUCKET_BYTES, _BUCKET_BYTES_OF_SEVERAL, _BUCKET_BYTES_ON_DEVICE = 16 * 2**20, 4 * 2**20, 64 * 2**20
REDUCE_DTYPES: tuple[ReduceDtype, ...] = get_args(ReduceDtype)


@dataclass(frozen=True)
class EngineSettings:
    """How one rank's parameters, gradients and optimizers are sharded.

    Attributes:
        bucket_bytes: Size of a bucket, in bytes; None for that of `bucket_bytes_on`.
        partition: How buckets are cut.
        whole_gradients: Whether every ``.grad`` is the averaged gradient after a backward pass, as under DDP, which
            costs a gather; otherwise only gradients of the own shard are averaged.
        keeps_gradients: Whether user code may look at the gradients of a step after it, so that they go back as well.
            This costs a copy of them.
        manual: Whether one step is a batch with any number of optimizer steps (manual optimization).
        shared_memory: Whether ranks of one machine read each other's memory instead of sending; host memory only.
        guard: How much of the shard is checked for bits that change by themselves.
        reduce_dtype: The dtype in which gradients leave a node; None for their own.
        uncounted: Positions of parameters whose gradients the global norm leaves out on this rank: those of which
            tensor or pipeline parallelism has copies on other ranks that count.
        experts: Positions of parameters that the second of the rank's grids shards.
        counts_zeros: Whether each commit counts the elements of the averaged gradient that are zero.
        recoverable: Whether a step may have to be undone. Otherwise nothing is kept or checked for recovery.

    Raises:
        ConfigurationError: If a value is invalid.
    """

    bucket_bytes: int | None = None
    partition: Partition = "element"
    whole_gradients: bool = False
    keeps_gradients: bool = False
    manual: bool = False
    shared_memory: bool = True
    guard: GuardMode = "sampled"
    reduce_dtype: ReduceDtype | None = None
    uncounted: frozenset[int] = frozenset()
    experts: frozenset[int] = frozenset()
    counts_zeros: bool = False
    recoverable: bool = True

    def __post_init__(self) -> None:
        if self.bucket_bytes is not None:
            checks.whole(1, bucket_bytes=self.bucket_bytes)
        checks.choice("partition", self.partition, ("element", "parameter"))
        checks.choice("shared_memory", self.shared_memory, (True, False))
        checks.choice("reduce_dtype", self.reduce_dtype, (None, *REDUCE_DTYPES))
        checks.choice("guard", self.guard, ("sampled", "full", "off"))

    def bucket_bytes_on(self, nodes: int, on_host: bool) -> int:
        """Return the size of a bucket, in bytes.

        Between nodes the link is often the bottleneck: smaller buckets reach it sooner, and the last one leaves it
        sooner. On one node the cores are, and each bucket costs operations. For a GPU they are calls of the host, on
        any number of nodes. docs/decisions.md has the figures. The size follows from the grid and not from a
        measurement, because the last bits of a clipped gradient's norm follow it.

        Args:
            nodes: Number of nodes.
            on_host: Whether parameters lie in the host's memory.
        """
        if self.bucket_bytes is not None:
            return self.bucket_bytes
        if not on_host:
            return _BUCKET_BYTES_ON_DEVICE
        return _BUCKET_BYTES if nodes == 1 else _BUCKET_BYTES_OF_SEVERAL

    @property
    def wire(self) -> torch.dtype | None:
        """``reduce_dtype`` as torch knows it."""
        found: torch.dtype | None = None if self.reduce_dtype is None else getattr(torch, self.reduce_dtype)
        return found
