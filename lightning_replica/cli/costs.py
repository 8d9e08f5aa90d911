"""Costs of a job per rank: memory and traffic, for DDP, ZeRO-1 and `replica_zero`. Pure functions.

Psi elements, N ranks, R replicas, S = N / R shards; p bytes per parameter element, g per gradient element.
Activations, buffers of the model, autocast's 16-bit copies and what a backend needs for itself are not counted.
"""

import math
from dataclasses import dataclass, replace
from typing import Literal, get_args

from lightning_replica.core import checks
from lightning_replica.errors import ConfigurationError
from lightning_replica.sharding.engine import REDUCE_DTYPES, EngineSettings, ReduceDtype

Precision = Literal["32-true", "64-true", "bf16-true", "16-true", "bf16-mixed", "16-mixed"]

# Lightning's other names for these precisions; Lightning takes the numbers as int, too.
ALIASES: dict[str, Precision] = {"64": "64-true", "32": "32-true", "16": "16-mixed", "bf16": "bf16-mixed"}

_PARAMETER_BYTES = {"32-true": 4, "64-true": 8, "bf16-true": 2, "16-true": 2, "bf16-mixed": 4, "16-mixed": 4}


@dataclass(frozen=True)
class Job:
    """A training job: the model, its precision, and the ranks.

    Attributes:
        ranks: N, 1 or more.
        replicas: R; divides ``ranks``.
        parameters: Psi, the number of trained elements.
        precision: The precision of the Trainer.
        optimizer_bytes: Bytes of optimizer state per element. None means two values of the main parameters' dtype, as
            for Adam.
        reduce_dtype: The dtype in which gradients leave a node; None for that of the parameters.

    Raises:
        ConfigurationError: If a value makes no sense.
    """

    ranks: int
    replicas: int
    parameters: int
    precision: Precision = "32-true"
    optimizer_bytes: float | None = None
    reduce_dtype: ReduceDtype | None = None

    def __post_init__(self) -> None:
        for name in ("ranks", "replicas", "parameters"):
            if getattr(self, name) < 1:
                raise ConfigurationError(f"{name}={getattr(self, name)} must be 1 or more.")
        if self.ranks % self.replicas:
            choices = ", ".join(str(r) for r in range(1, self.ranks + 1) if self.ranks % r == 0)
            raise ConfigurationError(
                f"replicas={self.replicas} does not divide ranks={self.ranks}: every shard must be held by the same"
                f" number of ranks. Choose one of {choices}."
            )
        if self.precision not in get_args(Precision):
            raise ConfigurationError(
                f"precision={self.precision!r} is not known. Choose one of {', '.join(get_args(Precision))},"
                f" or {', '.join(ALIASES)}."
            )
        checks.choice("reduce_dtype", self.reduce_dtype, (None, *REDUCE_DTYPES))
        if self.optimizer_bytes is not None and not 0 <= self.optimizer_bytes < math.inf:
            raise ConfigurationError(f"optimizer_bytes={self.optimizer_bytes} must be 0 or more.")

    @property
    def shards(self) -> int:
        """The number of shards, S = N / R."""
        return self.ranks // self.replicas

    @property
    def parameter_bytes(self) -> int:
        """Bytes per parameter element, p."""
        return _PARAMETER_BYTES[self.precision]

    @property
    def gradient_bytes(self) -> int:
        """Bytes per gradient element, g: as its parameter in torch; with `reduce_dtype`, 16 bits are added up in 32."""
        return self.parameter_bytes if self.reduce_dtype is None else self.main_bytes

    @property
    def wire_bytes(self) -> int:
        """Bytes per gradient element that leaves a node."""
        wire = EngineSettings(reduce_dtype=self.reduce_dtype).wire
        return self.gradient_bytes if wire is None else wire.itemsize

    @property
    def main_bytes(self) -> int:
        """Bytes per element of what the optimizer updates. Parameters of 16 bits are updated in 32 bits."""
        return max(4, self.parameter_bytes)

    @property
    def state_bytes(self) -> float:
        """Bytes of optimizer state per element."""
        return 2 * self.main_bytes if self.optimizer_bytes is None else self.optimizer_bytes


@dataclass(frozen=True)
class Memory:
    """Bytes that one rank holds.

    Attributes:
        parameters: The parameters that forward reads.
        gradients: The gradients that backward writes.
        main: The shard's values that the optimizer updates, if they are kept apart from what forward reads.
        main_gradients: The gradients of ``main``, if their dtype is not that of ``gradients``.
        optimizer: Optimizer state.
        receive: Buffers for gradients that are being reduced.
    """

    parameters: float
    gradients: float
    main: float
    main_gradients: float
    optimizer: float
    receive: float

    @property
    def total(self) -> float:
        """The sum of all parts."""
        return self.parameters + self.gradients + self.main + self.main_gradients + self.optimizer + self.receive


def receive_bytes(job: Job) -> float:
    """Return the bytes for pieces that arrive during the reduction: four buckets of 16 MiB, the most by default."""
    return min(job.parameters * job.gradient_bytes, 4 * 16 * 2.0**20)


def memory(job: Job) -> Memory:
    """Return the bytes that a rank holds under `replica_zero`; with R = 1 that is ZeRO-1."""
    whole, owned = job.parameters, job.parameters / job.shards
    return Memory(
        parameters=whole * job.parameter_bytes,
        gradients=whole * job.gradient_bytes,
        main=owned * job.main_bytes,
        main_gradients=owned * job.main_bytes if job.gradient_bytes < job.main_bytes else 0,
        optimizer=owned * job.state_bytes,
        receive=receive_bytes(job),
    )


def ddp_memory(job: Job) -> Memory:
    """Return the bytes that a rank holds under DDP: everything is whole, and buckets are copies of the gradients.

    DDP updates the parameters themselves. So parameters of 16 bits have optimizer state of 16 bits.
    """
    whole = job.parameters * job.parameter_bytes
    optimizer = job.parameters * job.state_bytes * job.parameter_bytes / job.main_bytes
    return Memory(whole, whole, main=0, main_gradients=0, optimizer=optimizer, receive=whole)


def sent_bytes(ranks: int, replicas: int, parameter_bytes: int, gradient_bytes: int) -> float:
    """Return the bytes that a rank sends per step and element: [g(N + R - 2) + p(N - R)] / N.

    R = 1 is ZeRO-1. R = N is DDP, which only reduces and gathers nothing.
    """
    return (gradient_bytes * (ranks + replicas - 2) + parameter_bytes * (ranks - replicas)) / ranks


def node_traffic(job: Job, nodes: int) -> float | None:
    """Return the bytes that leave a node in a step: [g(M + R - 2) + p(M - R)] Psi / M on M nodes.

    That is on two levels (see [Note: two levels] in sharding/levels.py); g counts the bytes of a gradient that is sent.
    None if replicas do not fill nodes: R must divide M.
    """
    if nodes == 1:
        return 0.0
    if nodes % job.replicas:
        return None
    return job.parameters * sent_bytes(nodes, job.replicas, job.parameter_bytes, job.wire_bytes)


def ddp_node_traffic(job: Job, nodes: int) -> float:
    """Return the bytes that leave a node in a step under DDP: a ring through all ranks leaves it once."""
    return ddp_traffic(job) if nodes > 1 else 0.0


def traffic(job: Job) -> float:
    """Return the bytes that a rank sends in a step."""
    return job.parameters * sent_bytes(job.ranks, job.replicas, job.parameter_bytes, job.gradient_bytes)


def zero1(job: Job) -> Job:
    """Return the job with one replica, that is without redundancy."""
    return replace(job, replicas=1)


def ddp_traffic(job: Job) -> float:
    """Return the bytes that a rank sends in a step under DDP: 2 (N - 1) / N of the gradients."""
    return traffic(replace(job, replicas=job.ranks, reduce_dtype=None))
