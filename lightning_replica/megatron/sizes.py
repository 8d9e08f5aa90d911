"""How a world is divided into model parallel and data parallel ranks: pure functions of integers."""

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from lightning_replica.core import checks
from lightning_replica.core.grid import Grid, grids_of_every
from lightning_replica.core.grids import Grids
from lightning_replica.errors import ConfigurationError


@dataclass(frozen=True)
class ParallelSizes:
    """The sizes of model parallelism, by megatron-core's names.

    Ranks are numbered as in megatron-core's default order, "tp-cp-ep-dp-pp": tensor ranks are neighbours, pipeline
    stages are apart (tests/megatron/test_sizes.py compares with `RankGenerator`).

    Attributes:
        tensor_model_parallel_size: Ranks that share every layer, TP.
        pipeline_model_parallel_size: Stages that the layers are divided into, PP.
        context_parallel_size: Ranks that share every sequence, CP. They have the same parameters, so they count as data
            parallel ranks where these are sharded.
        expert_model_parallel_size: Ranks that divide the experts of a layer among themselves, EP. They are data
            parallel ranks for the rest of the model.
        expert_tensor_parallel_size: Ranks that share every expert; None for TP.
        virtual_pipeline_model_parallel_size: Chunks of the model that each stage has; None for one.
        sequence_parallel: Whether tensor ranks divide the sequence among themselves between tensor parallel regions.

    Raises:
        ConfigurationError: If a size is not positive.
    """

    tensor_model_parallel_size: int = 1
    pipeline_model_parallel_size: int = 1
    context_parallel_size: int = 1
    expert_model_parallel_size: int = 1
    expert_tensor_parallel_size: int | None = None
    virtual_pipeline_model_parallel_size: int | None = None
    sequence_parallel: bool = False

    def __post_init__(self) -> None:
        """Check the values.

        Raises:
            ConfigurationError: See the class.
        """
        checks.whole(
            1,
            tensor_model_parallel_size=self.tensor_model_parallel_size,
            pipeline_model_parallel_size=self.pipeline_model_parallel_size,
            context_parallel_size=self.context_parallel_size,
            expert_model_parallel_size=self.expert_model_parallel_size,
            expert_tensor_parallel_size=self.experts_tensor_size,
        )
        if self.virtual_pipeline_model_parallel_size is not None:
            checks.whole(2, virtual_pipeline_model_parallel_size=self.virtual_pipeline_model_parallel_size)
            if self.pipeline_model_parallel_size == 1:
                raise ConfigurationError(
                    f"virtual_pipeline_model_parallel_size={self.virtual_pipeline_model_parallel_size} divides the"
                    " stages of a pipeline, but pipeline_model_parallel_size is 1."
                )
        if self.sequence_parallel and self.tensor_model_parallel_size == 1:
            raise ConfigurationError(
                "sequence_parallel=True divides the sequence among tensor parallel ranks, but"
                " tensor_model_parallel_size is 1."
            )
        if self.expert_model_parallel_size == 1 and self.experts_tensor_size != self.tensor_model_parallel_size:
            raise ConfigurationError(
                f"expert_tensor_parallel_size={self.expert_tensor_parallel_size} differs from"
                f" tensor_model_parallel_size={self.tensor_model_parallel_size}, which megatron-core supports only with"
                " expert_model_parallel_size of at least 2."
            )

    @property
    def for_groups(self) -> dict[str, int | None]:
        """The sizes that ``initialize_model_parallel`` takes, by its names."""
        sizes = asdict(self)
        del sizes["sequence_parallel"]
        return sizes

    @property
    def for_model(self) -> dict[str, Any]:
        """The sizes that ``TransformerConfig`` takes, by its names."""
        return {**asdict(self), "expert_tensor_parallel_size": self.experts_tensor_size}

    @property
    def interleaved_stages(self) -> int:
        """What the number of micro-batches must be a multiple of: megatron-core's interleaved schedule needs that."""
        return 1 if self.virtual_pipeline_model_parallel_size is None else self.pipeline_model_parallel_size

    @property
    def experts_tensor_size(self) -> int:
        """Number of ranks that share every expert."""
        own = self.expert_tensor_parallel_size
        return self.tensor_model_parallel_size if own is None else own

    @property
    def experts_size(self) -> int:
        """Number of ranks of a stage that together have all experts."""
        return self.experts_tensor_size * self.expert_model_parallel_size

    @property
    def model_size(self) -> int:
        """Number of ranks that hold one copy of the model, and read the same data."""
        return self.tensor_model_parallel_size * self.pipeline_model_parallel_size * self.context_parallel_size

    def check_groups(self, made: Mapping[str, int | None]) -> None:
        """Check the sizes of process groups that were made before, for an earlier trainer or by the user.

        Raises:
            ConfigurationError: If they are not these.
        """
        wanted = {**self.for_groups, "expert_tensor_parallel_size": self.experts_tensor_size}
        other = {name: size for name, size in made.items() if size != wanted[name]}
        if other:
            raise ConfigurationError(
                f"megatron-core's process groups exist already, with {', '.join(f'{n}={s}' for n, s in other.items())},"
                f" but the strategy has {', '.join(f'{name}={wanted[name]}' for name in other)}. Let the strategy make"
                " them, and use the same sizes for all trainers of a script."
            )

    def data_parallel_size(self, world_size: int) -> int:
        """Return the number of ranks that read different data, DP.

        Raises:
            ConfigurationError: If the sizes do not divide ``world_size``.
        """
        if world_size % self.model_size:
            raise ConfigurationError(
                f"{self}: together they take {self.model_size} ranks for one copy of the model, which does not divide"
                f" world_size={world_size}. Choose `devices` (and `num_nodes`) so that it does."
            )
        return world_size // self.model_size

    def __str__(self) -> str:
        sizes = (
            f"tensor_model_parallel_size={self.tensor_model_parallel_size}, pipeline_model_parallel_size="
            f"{self.pipeline_model_parallel_size}, context_parallel_size={self.context_parallel_size}"
        )
        if self.experts_size == self.tensor_model_parallel_size:
            return sizes
        return (
            f"{sizes}, expert_model_parallel_size={self.expert_model_parallel_size}, expert_tensor_parallel_size="
            f"{self.experts_tensor_size}"
        )

    def data_parallel_rank(self, rank: int, world_size: int) -> int:
        """Return which part of the data ``rank`` reads."""
        return self._in_stage(rank, world_size) // (self.tensor_model_parallel_size * self.context_parallel_size)

    def tensor_rank(self, rank: int) -> int:
        """Return the tensor parallel rank of ``rank``."""
        return rank % self.tensor_model_parallel_size

    def experts_tensor_rank(self, rank: int) -> int:
        """Return the tensor parallel rank of ``rank`` in its experts."""
        return rank % self.experts_tensor_size

    def part_name(self, rank: int, world_size: int) -> str:
        """Return what the names of a rank's tensors begin with in a checkpoint; empty if it has the whole model."""
        if self.tensor_model_parallel_size == self.pipeline_model_parallel_size == self.experts_size == 1:
            return ""
        return f"stage_{self.stage(rank, world_size)}.tensor_{self.tensor_rank(rank)}"

    def experts_name(self, rank: int, world_size: int) -> str:
        """Return what the names of the tensors of a rank's experts begin with in a checkpoint."""
        experts = self._in_stage(rank, world_size) % self.experts_size
        group, tensor = divmod(experts, self.experts_tensor_size)
        return f"stage_{self.stage(rank, world_size)}.experts_{group}.tensor_{tensor}"

    def stage(self, rank: int, world_size: int) -> int:
        """Return the pipeline stage of ``rank``."""
        return rank // (world_size // self.pipeline_model_parallel_size)

    def grids(self, world_size: int, replicas: int, nodes: int) -> Grids:
        """Return the grids: one for each tensor rank of each stage, of the ranks that have the same parameters.

        Raises:
            ConfigurationError: If the sizes do not divide ``world_size``, or R does not divide the size of a grid.
        """
        size = self.data_parallel_size(world_size) * self.context_parallel_size
        if size % replicas:
            raise ConfigurationError(
                f"{replicas=} does not divide the {size} ranks that have the same parameters (data parallel ranks times"
                f" context parallel ranks), with {self} and world_size={world_size}."
            )
        tensor = self.tensor_model_parallel_size
        grids = self._every(tensor, replicas, world_size, nodes)
        names = [f"tensor rank {n % tensor} of stage {n // tensor}" for n in range(len(grids))]
        experts = self._experts(size, replicas, world_size, nodes)
        return Grids(grids, tuple(names) if len(grids) > 1 else ("",), () if experts == grids else experts)

    def _experts(self, averaged_over: int, replicas: int, world_size: int, nodes: int) -> tuple[Grid, ...]:
        """Return the grids of the experts: one for each of the parts of a stage's experts."""
        in_stage = world_size // self.pipeline_model_parallel_size
        if in_stage % self.experts_size:
            raise ConfigurationError(
                f"{self}: all experts of a stage take {self.experts_size} ranks, which does not divide the {in_stage}"
                f" ranks of a stage, with world_size={world_size}."
            )
        size = in_stage // self.experts_size
        if size % replicas:
            raise ConfigurationError(
                f"{replicas=} does not divide the {size} ranks that have the same experts, with {self} and"
                f" world_size={world_size}."
            )
        return self._every(self.experts_size, replicas, world_size, nodes, averaged_over)

    def _every(
        self, stride: int, replicas: int, world_size: int, nodes: int, averaged_over: int | None = None
    ) -> tuple[Grid, ...]:
        """Return the grids of every ``stride``-th rank of each stage."""
        in_stage = world_size // self.pipeline_model_parallel_size
        stages = (range(first, first + in_stage) for first in range(0, world_size, in_stage))
        return tuple(
            grid
            for stage in stages
            for grid in grids_of_every(stride, stage, replicas, world_size // nodes, averaged_over)
        )

    def _in_stage(self, rank: int, world_size: int) -> int:
        return rank % (world_size // self.pipeline_model_parallel_size)
