"""What the package relies on in DTensors, some of it private."""

from typing import Any, cast

import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor

from lightning_replica._compat import dtensor
from tests.support.ranks import open_world, run_ranks
from tests.support.typed import tensor_of


def relied_on(rank: int, store: Any) -> dict[str, Any]:
    open_world(rank, store, 2)
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("rows",))
    whole = torch.arange(10.0).view(5, 2)
    rows = nn.Parameter(distribute_tensor(whole, mesh, [Shard(0)]))
    same = nn.Parameter(distribute_tensor(whole, mesh, [Replicate()]))
    memory = torch.full_like(dtensor.local_of(rows), 7.0)
    dtensor.set_local(rows, memory)
    memory[0] = 1.0
    same.grad = DTensor.from_local(torch.full((5, 2), 1.0 + rank), mesh, [Partial()], run_check=False)
    rows.grad = dtensor.like(rows, memory)
    gradients = [tensor_of(dtensor.local_gradient(each)) for each in (rows, same)]
    return {
        "divided": [dtensor.is_divided(each) for each in (rows, same, whole)],
        "shared": [dtensor.is_shared(each) for each in (rows, same, whole)],
        "sizes": len(dtensor.local_of(rows)),
        "uneven": rows.grad.shape == rows.shape,
        "values": cast("DTensor", rows).full_tensor()[:, 0].tolist(),
        "gradient is a view": gradients[0].data_ptr() == memory.data_ptr(),
        "gradient is a sum": gradients[1].unique().tolist(),
        "plain": dtensor.local_of(whole) is whole and dtensor.like(whole, memory) is memory,
        "mesh": [list(each) for each in (dtensor.ranks_of(rows), dtensor.names_of_mesh(rows), dtensor.ranks_of(whole))],
    }


def test_the_part_of_a_tensor() -> None:
    for rank, found in enumerate(run_ranks(2, relied_on)):
        assert found == {
            "divided": [True, True, False],
            "shared": [False, True, True],
            "sizes": [3, 2][rank],
            "uneven": True,
            "values": [1.0, 7.0, 7.0, 1.0, 7.0],
            "gradient is a view": True,
            "gradient is a sum": [3.0],
            "plain": True,
            "mesh": [[0, 1], ["rows"], []],
        }
