"""Mistakes a user makes with tensor parallelism: one error, before anyone waits for anyone."""

from functools import partial
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Shard, distribute_tensor

from lightning_replica import ConfigurationError, ReplicaZeroStrategy
from lightning_replica.errors import ReplicaError
from lightning_replica.trainer.tensor_parallel import TensorParallel
from tests.support import world
from tests.tensor_parallel import job
from tests.tensor_parallel.job import make


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"tensor_parallel_size": 0}, "tensor_parallel_size=0 must be a whole number, 1 or more"),
        ({"tensor_parallel_size": "auto"}, "tensor_parallel_size='auto' must be a whole number"),
        (
            {"tensor_parallel_size": 2, "state_dict_type": "full"},
            "state_dict_type='full'.*no rank has all of the model",
        ),
        ({"tensor_parallel_size": 2, "partition": "parameter"}, "partition='parameter' with tensor_parallel_size=2"),
    ],
)
def test_the_strategy_refuses(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigurationError, match=message):
        ReplicaZeroStrategy(**options)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"tensor_parallel_size": 3}, r"tensor_parallel_size=3 does not divide world_size=4.*Choose one of 1, 2, 4"),
        ({"tensor_parallel_size": 4}, r"replicas=2 does not divide the 1 ranks that have the same.*Choose one of 1\."),
    ],
)
def test_the_trainer_refuses(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigurationError, match=message):
        L.Trainer(accelerator="cpu", devices=4, logger=False, strategy=ReplicaZeroStrategy(**options))


def test_there_is_no_mesh_without_tensor_parallelism() -> None:
    with pytest.raises(ReplicaError, match="There is no device mesh"):
        _ = ReplicaZeroStrategy().device_mesh


def test_tensor_ranks_are_neighbours_and_each_has_a_grid() -> None:
    grids = TensorParallel(2).grids(8, 2, 2)
    assert [(grid.ranks, grid.nodes) for grid in grids.grids] == [((0, 2, 4, 6), 2), ((1, 3, 5, 7), 2)]
    assert grids.shard_name(3) == "1 of tensor rank 1"


def not_parallelized(module: job.Model) -> None:
    """A ``configure_model`` that forgets it."""


def over_all_ranks(module: job.Model) -> None:
    job.divide(module.block, init_device_mesh("cpu", (4,), mesh_dim_names=("all",)))


def over_data_parallel_ranks(module: job.Model) -> None:
    assert module.device_mesh is not None
    job.divide(module.block, module.device_mesh["tensor_parallel"])
    fully_shard(module.block, mesh=module.device_mesh["data_parallel"])


def without_saying_so(module: job.Model) -> None:
    mesh = init_device_mesh("cpu", (4,))
    module.last.weight = torch.nn.Parameter(distribute_tensor(module.last.weight, mesh, [Shard(1)]))


def run(configure_model: Any, case: job.Case, out: Path) -> None:
    job.Model.configure_model = configure_model  # type: ignore[method-assign]
    job.run(case, out)


@pytest.mark.parametrize(
    ("configure_model", "tensor", "message"),
    [
        (not_parallelized, 2, "tensor_parallel_size=2, but no parameter of Model is divided among ranks. Call `para"),
        (over_all_ranks, 2, r"is divided among ranks [0, 1, 2, 3] (dimensions"),
        (over_data_parallel_ranks, 2, "(dimensions ['data_parallel', 'tensor_parallel']), but the tensor ranks here"),
        (without_saying_so, 1, "The parameter 'last.weight' is a DTensor, but tensor_parallel_size=1. Say `ReplicaZ"),
    ],
)
def test_a_module_that_is_divided_otherwise(tmp_path: Path, configure_model: Any, tensor: int, message: str) -> None:
    outcome = world.run(make(tensor=tensor), tmp_path, target=partial(run, configure_model))
    assert outcome.code == 1
    assert message in outcome.logs  # of one rank at least: when the first ends, the others are ended
