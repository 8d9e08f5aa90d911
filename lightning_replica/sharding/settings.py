"""The settings that decide how a state is sharded."""

from dataclasses import dataclass
from typing import Literal, TypeAlias, get_args

import torch

from lightning_replica.core import checks
from lightning_replica.core.digests import GuardMode
from lightning_replica.sharding.layout import Partition

ReduceDtype: TypeAlias = Literal["bfloat16", "float16", "float32"]
REDUCE_DTYPES: tuple[ReduceDtype, ...] = get_args(ReduceDtype)


@dataclass(frozen=True)
class EngineSettings:
    """How one rank's parameters, gradients and optimizers are sharded.

    Attributes:
        bucket_bytes: Size of a bucket, in bytes.
        partition: How buckets are cut.
        whole_gradients: Whether every ``.grad`` is the averaged gradient after a backward pass, as under DDP, which
            costs a gather; otherwise only gradients of the own shard are averaged.
        manual: Whether one step is a batch with any number of optimizer steps (manual optimization).
        shared_memory: Whether ranks of one machine read each other's memory instead of sending; host memory only.
        guard: How much of the shard is checked for bits that change by themselves.
        reduce_dtype: The dtype in which gradients leave a node; None for their own.
        recoverable: Whether a step may have to be undone. Otherwise nothing is kept or checked for recovery.

    Raises:
        ConfigurationError: If a value is invalid.
    """

    bucket_bytes: int
    partition: Partition = "element"
    whole_gradients: bool = False
    manual: bool = False
    shared_memory: bool = True
    guard: GuardMode = "sampled"
    reduce_dtype: ReduceDtype | None = None
    recoverable: bool = True

    def __post_init__(self) -> None:
        checks.whole(1, bucket_bytes=self.bucket_bytes)
        checks.choice("partition", self.partition, ("element", "parameter"))
        checks.choice("reduce_dtype", self.reduce_dtype, (None, *REDUCE_DTYPES))
        checks.choice("guard", self.guard, ("sampled", "full", "off"))

    @property
    def wire(self) -> torch.dtype | None:
        """``reduce_dtype`` as torch knows it."""
        found: torch.dtype | None = None if self.reduce_dtype is None else getattr(torch, self.reduce_dtype)
        return found
