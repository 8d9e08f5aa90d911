"""The settings that decide how a state is sharded."""

from dataclasses import dataclass

from lightning_replica.core import checks
from lightning_replica.core.digests import GuardMode
from lightning_replica.sharding.layout import Partition


@dataclass(frozen=True)
class EngineSettings:
    """How one rank's parameters, gradients and optimizers are sharded.

    Attributes:
        bucket_bytes: Size at which a bucket is closed, in bytes.
        partition: How buckets are cut.
        whole_gradients: Whether every ``.grad`` is the averaged gradient after a backward pass, as under DDP, which
            costs a gather; otherwise only gradients of the own shard are averaged.
        manual: Whether one step is a batch with any number of optimizer steps (manual optimization).
        shared_memory: Whether ranks of one machine read each other's memory instead of sending; host memory only.
        guard: How much of the shard is checked for bits that change by themselves.
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
    recoverable: bool = True

    def __post_init__(self) -> None:
        checks.whole(1, bucket_bytes=self.bucket_bytes)
        checks.choice("partition", self.partition, ("element", "parameter"))
        checks.choice("guard", self.guard, ("sampled", "full", "off"))
