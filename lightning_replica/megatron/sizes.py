"""How a world is divided into model parallel and data parallel ranks: pure functions of integers."""

from dataclasses import dataclass

from lightning_replica.core import checks
from lightning_replica.core.grid import Grid
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

    Raises:
        ConfigurationError: If a size is not positive.
    """

    tensor_model_parallel_size: int = 1
    pipeline_model_parallel_size: int = 1
    context_parallel_size: int = 1

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
        )

    @property
    def model_size(self) -> int:
        """Number of ranks that hold one copy of the model, and read the same data."""
        return self.tensor_model_parallel_size * self.pipeline_model_parallel_size * self.context_parallel_size

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
        return (
            f"tensor_model_parallel_size={self.tensor_model_parallel_size}, pipeline_model_parallel_size="
            f"{self.pipeline_model_parallel_size}, context_parallel_size={self.context_parallel_size}"
        )

    def data_parallel_rank(self, rank: int, world_size: int) -> int:
        """Return which part of the data ``rank`` reads."""
        return self._in_stage(rank, world_size) // (self.tensor_model_parallel_size * self.context_parallel_size)

    def tensor_rank(self, rank: int) -> int:
        """Return the tensor parallel rank of ``rank``."""
        return rank % self.tensor_model_parallel_size

    def part_name(self, rank: int, world_size: int) -> str:
        """Return what the names of a rank's tensors begin with in a checkpoint; empty if it has the whole model."""
        if self.tensor_model_parallel_size == self.pipeline_model_parallel_size == 1:
            return ""
        stage = rank // (world_size // self.pipeline_model_parallel_size)
        return f"stage_{stage}.tensor_{self.tensor_rank(rank)}"

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
        grids, names = [], []
        per_stage, per_node = world_size // self.pipeline_model_parallel_size, world_size // nodes
        for stage in range(self.pipeline_model_parallel_size):
            for tensor in range(self.tensor_model_parallel_size):
                first = stage * per_stage + tensor
                ranks = tuple(range(first, (stage + 1) * per_stage, self.tensor_model_parallel_size))
                grids.append(Grid(ranks, replicas, _nodes_of(ranks, per_node)))
                names.append(f"tensor rank {tensor} of stage {stage}")
        return Grids(tuple(grids), tuple(names) if len(grids) > 1 else ("",))

    def _in_stage(self, rank: int, world_size: int) -> int:
        return rank % (world_size // self.pipeline_model_parallel_size)


def _nodes_of(ranks: tuple[int, ...], per_node: int) -> int:
    """Return on how many nodes the ranks of a grid stand; 1 if they are not spread evenly."""
    counts: dict[int, int] = {}
    for rank in ranks:
        counts[rank // per_node] = counts.get(rank // per_node, 0) + 1
    return len(counts) if len(set(counts.values())) == 1 else 1
