"""Which rank has which part of the model: all of it, or what torch's own tensor parallelism gives it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from lightning_replica._compat.dtensor import is_shared, like, local_of
from lightning_replica._compat.lightning import give_mesh
from lightning_replica.core.grid import Grid
from lightning_replica.core.grids import Grids
from lightning_replica.errors import ConfigurationError, ReplicaError
from lightning_replica.trainer.model_part import ModelPart
from lightning_replica.trainer.saving.checkpoints import is_absent
from lightning_replica.trainer.saving.lightning_checkpoints import LightningCheckpoints
from lightning_replica.trainer.tensor_parallel import TensorParallel

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh


class ModelParallel(LightningCheckpoints):
    """Divides the world into grids of ranks that have the same parameters, and reads and writes their parts."""

    _tensor: TensorParallel
    _replicas: int
    _num_nodes: int
    _mesh: DeviceMesh | None

    @property
    def grids(self) -> Grids:
        """Which rank owns which shard: one grid, or one for each tensor rank."""
        if self._tensor.on:
            return self._tensor.grids(self.world_size, self._replicas, self._num_nodes)
        size = self.world_size
        return Grids.of(Grid.of(size, self._replicas, self._num_nodes) if size > 1 else Grid.of(1, 1))

    @property
    def distributed_sampler_kwargs(self) -> dict[str, Any]:
        """Arguments of the sampler, by which every rank reads its own part of the data; tensor ranks read the same."""
        return {"num_replicas": self._tensor.copies(self.world_size), "rank": self._tensor.copy(self.global_rank)}

    @property
    def device_mesh(self) -> DeviceMesh:
        """The mesh of all ranks, with the dimensions "data_parallel" and "tensor_parallel", as under Lightning's own.

        Raises:
            ReplicaError: Without tensor parallelism, or before the ranks are set up.
        """
        if self._mesh is None:
            raise ReplicaError(
                "There is no device mesh: it exists with `ReplicaZeroStrategy(tensor_parallel_size=...)` of at least 2,"
                " from `configure_model` on."
            )
        return self._mesh

    def _make_mesh(self, kind: str) -> None:
        """Give the LightningModule a mesh of devices of a kind, for its ``configure_model``. Collective."""
        if not self._tensor.on:
            return
        if self._mesh is None:
            self._mesh = self._tensor.mesh(kind, self.world_size)
        if self.lightning_module is not None:
            give_mesh(self.lightning_module, self._mesh)

    def part(self) -> ModelPart:
        """Return which part of the model this rank has."""
        return self._tensor.part(self.lightning_module, self.global_rank)

    def _sync_module(self) -> None:
        """Give every rank of a grid the parameters and buffers of its first, as under DDP.

        What all tensor ranks have is rank 0's everywhere.
        """
        if self.model is None:
            return
        part, groups = self.part(), self.session.world.groups
        with torch.no_grad():
            for name, tensor in (*self.model.named_parameters(), *self.model.named_buffers()):
                own = local_of(tensor)
                members = groups.of_grids[part.is_expert(name)].members
                group = groups.world if self._tensor.on and is_shared(tensor) else members
                work = dist.broadcast(own.data, group=group, group_src=0, async_op=True)
                self.session.world.wait(work, own)

    def model_to_device(self) -> None:
        """Move the model to this rank's device, unless all of it is there: torch cannot move a DTensor at any time."""
        if self.model is None:
            return
        tensors = (*self.model.parameters(), *self.model.buffers())
        if not self._tensor.on or any(tensor.device != self.root_device for tensor in tensors):
            self.model.to(self.root_device)

    def teardown(self) -> None:
        """Tear down. DTensors stay on the devices of their mesh, as under Lightning's `ModelParallelStrategy`."""
        if not self._tensor.on:
            super().teardown()
            return
        for part in (self.cluster_environment, self.precision_plugin, self.accelerator, self.checkpoint_io):
            if part is not None:
                part.teardown()

    # Checkpoints of a part

    def load_checkpoint(self, checkpoint_path: Any, weights_only: bool | None = None) -> dict[str, Any]:
        """Read a checkpoint of either form; outside of a fit, only the weights of this rank's part of the model.

        Raises:
            CheckpointError: If it is damaged.
            ConfigurationError: If it is not of this model's parts.
        """
        checkpoint = super().load_checkpoint(checkpoint_path, weights_only)
        if not self._tensor.on or is_absent(checkpoint) or self._checkpoints.is_open:
            return checkpoint
        own = self.part().own(checkpoint["state_dict"])
        if self._is_fitting or not own:
            raise ConfigurationError(
                f"{checkpoint_path} holds whole weights, not those of tensor ranks. Load them in `configure_model`,"
                " before `parallelize_module`, or resume from a checkpoint that a run with"
                f" tensor_parallel_size={self._tensor.size} has written."
            )
        return {**checkpoint, "state_dict": self._as_divided(own)}

    def _as_divided(self, tensors: dict[str, Any]) -> dict[str, Any]:
        known = {} if self.lightning_module is None else self.lightning_module.state_dict(keep_vars=True)
        return {name: like(known[name], value) if name in known else value for name, value in tensors.items()}

    def save_checkpoint(self, checkpoint: dict[str, Any], filepath: Any, storage_options: Any | None = None) -> None:
        """Write a checkpoint.

        Raises:
            ConfigurationError: Outside of a fit of a model that is divided among ranks: there are no shards, and no
                rank has all of it.
        """
        if self._training is None and self.part().name:
            raise ConfigurationError(
                f"{filepath} cannot be written outside of a fit: no rank has all of the model. Save it while fitting."
            )
        super().save_checkpoint(checkpoint, filepath, storage_options)
