"""Torch's own tensor parallelism: how it divides a world, and which part of a module each rank has."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from torch import nn

from lightning_replica._compat.dtensor import is_divided, is_shared, names_of_mesh, ranks_of
from lightning_replica.core.grid import Grid, grids_of_every
from lightning_replica.core.grids import Grids
from lightning_replica.errors import ConfigurationError
from lightning_replica.sharding.engine import Partition
from lightning_replica.trainer.model_part import ModelPart
from lightning_replica.trainer.saving.checkpoints import StateDictType

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

_DATA, _TENSOR = "data_parallel", "tensor_parallel"  # the dimensions of the mesh, by Lightning's names


@dataclass(frozen=True)
class TensorParallel:
    """How many ranks share every layer that the user parallelizes.

    Ranks are numbered as in Lightning's `ModelParallelStrategy`: the tensor ranks of one copy of the model are
    neighbours. Ranks that have the same tensor rank have the same parameters, and are a grid.

    Attributes:
        size: The number of tensor ranks; 1 is no tensor parallelism.
    """

    size: int = 1

    @property
    def on(self) -> bool:
        """Whether there are several tensor ranks."""
        return self.size > 1

    def form_of_checkpoints(self, given: StateDictType | Literal["auto"], partition: Partition) -> StateDictType:
        """Return the form of checkpoints, and refuse what needs a rank that has whole parameters.

        Args:
            given: The form that the user has chosen.
            partition: How parameters are cut.

        Raises:
            ConfigurationError: If there is no such rank.
        """
        if not self.on:
            return "full" if given == "auto" else given
        if given == "full":
            raise ConfigurationError(
                f"state_dict_type='full' with tensor_parallel_size={self.size}: no rank has all of the model. Use"
                " `state_dict_type='sharded'`, or leave it out."
            )
        if partition == "parameter":
            raise ConfigurationError(
                f"partition='parameter' with tensor_parallel_size={self.size}: an optimizer that needs whole parameters"
                " would get a tensor rank's part of them. Use `partition='element'` and an optimizer that updates every"
                " element on its own."
            )
        return "sharded"

    def copies(self, world_size: int) -> int:
        """Return the number of copies of the model, which is that of data parallel ranks.

        Raises:
            ConfigurationError: If the tensor ranks of a copy do not divide ``world_size``.
        """
        if world_size % self.size:
            choices = ", ".join(str(size) for size in range(1, world_size + 1) if world_size % size == 0)
            raise ConfigurationError(
                f"tensor_parallel_size={self.size} does not divide world_size={world_size}: every copy of the model"
                f" takes {self.size} ranks. Choose one of {choices}, or other `devices`."
            )
        return world_size // self.size

    def copy(self, rank: int) -> int:
        """Return the copy of the model that ``rank`` has a part of, which is its data parallel rank."""
        return rank // self.size

    def tensor_rank(self, rank: int) -> int:
        """Return the tensor rank of ``rank``."""
        return rank % self.size

    def grids(self, world_size: int, replicas: int, nodes: int) -> Grids:
        """Return the grids: one for each tensor rank. One rank alone has a grid of its own, whatever ``replicas`` is.

        Raises:
            ConfigurationError: If the sizes do not divide each other.
        """
        if not self.on:
            return Grids.of(Grid.of(world_size, replicas, nodes) if world_size > 1 else Grid.of(1, 1))
        copies = self.copies(world_size)
        if copies % replicas:
            choices = ", ".join(str(r) for r in range(1, copies + 1) if copies % r == 0)
            raise ConfigurationError(
                f"{replicas=} does not divide the {copies} ranks that have the same parameters, with"
                f" tensor_parallel_size={self.size} and world_size={world_size}. Choose one of {choices}."
            )
        grids = grids_of_every(self.size, range(world_size), replicas, world_size // nodes)
        return Grids(grids, tuple(f"tensor rank {first}" for first in range(self.size)))

    def mesh(self, kind: str, world_size: int) -> DeviceMesh:
        """Make the mesh that a module is parallelized over. Collective.

        Args:
            kind: ``torch.device.type`` of the ranks' devices.
            world_size: Number of ranks.
        """
        from torch.distributed.device_mesh import init_device_mesh

        return init_device_mesh(kind, (self.copies(world_size), self.size), mesh_dim_names=(_DATA, _TENSOR))

    def part(self, module: nn.Module | None, rank: int) -> ModelPart:
        """Return the part of a module that a rank has. What all tensor ranks have counts on the first of them."""
        if not self.on:
            return ModelPart()
        number = self.tensor_rank(rank)
        parameters = list(module.parameters()) if module is not None and number > 0 else []
        elsewhere = (order for order, parameter in enumerate(parameters) if is_shared(parameter))
        return ModelPart(f"tensor_{number}", frozenset(elsewhere))

    def check(self, module: nn.Module, rank: int) -> None:
        """Check that a module is divided among this rank's tensor ranks, and among no others. Needs no other rank.

        Raises:
            ConfigurationError: If it is not.
        """
        first = rank - self.tensor_rank(rank)
        members = tuple(range(first, first + self.size))
        divided = [(name, parameter) for name, parameter in module.named_parameters() if is_divided(parameter)]
        if divided and not self.on:
            raise ConfigurationError(
                f"The parameter {divided[0][0]!r} is a DTensor, but tensor_parallel_size=1. Say"
                " `ReplicaZeroStrategy(tensor_parallel_size=...)`, and parallelize the module over"
                f" `self.device_mesh[{_TENSOR!r}]`."
            )
        for name, parameter in divided:
            if ranks_of(parameter) != members:
                raise ConfigurationError(
                    f"The parameter {name!r} is divided among ranks {list(ranks_of(parameter))} (dimensions"
                    f" {list(names_of_mesh(parameter))}), but the tensor ranks here are {list(members)}. Call"
                    f" `parallelize_module(module, self.device_mesh[{_TENSOR!r}], plan)`, and leave `fully_shard` out:"
                    " the strategy shards over data parallel ranks by itself."
                )
        if self.on and not divided:
            raise ConfigurationError(
                f"tensor_parallel_size={self.size}, but no parameter of {type(module).__name__} is divided among ranks."
                f" Call `parallelize_module(module, self.device_mesh[{_TENSOR!r}], plan)` in `configure_model`."
            )
