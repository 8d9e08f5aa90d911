"""`ReplicaOptimizer` with the names and signatures of the optimizers whose tests are run against it."""

import os
from collections.abc import Callable, Iterable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from lightning_replica import ReplicaOptimizer
from tests.support.doubles import overriding

REPLICAS = "LIGHTNING_REPLICA_UPSTREAM_REPLICAS"
"""How many ranks hold each shard, where that divides the number of ranks of a test; elsewhere one does."""


def replicas_of(group: Any) -> int:
    wanted = int(os.environ.get(REPLICAS, "1"))
    return wanted if dist.get_world_size(group) % wanted == 0 else 1


@overriding()
class _Adapter(ReplicaOptimizer):
    def step(self, closure: Any = None, **kwargs: Any) -> Any:
        """Two tests pass 0 as closure, which their optimizers hand on to one that does not look at it."""
        return super().step(closure if callable(closure) else None, **kwargs)


@overriding(new=("_all_params",))
class AsZeroRedundancyOptimizer(_Adapter):
    """Under the name of torch's. ``parameters_as_bucket_view`` is always so."""

    def __init__(
        self,
        params: Iterable[Any],
        optimizer_class: type[torch.optim.Optimizer],
        process_group: Any = None,
        parameters_as_bucket_view: bool = False,
        overlap_with_ddp: bool = False,
        **defaults: Any,
    ) -> None:
        if overlap_with_ddp:
            defaults["overlap_with_ddp"] = True
        super().__init__(params, optimizer_class, replicas_of(process_group), process_group, **defaults)

    @property
    def _all_params(self) -> list[Tensor]:
        return [parameter for group in self.param_groups for parameter in group["params"]]


@overriding()
class AsOSS(_Adapter):
    """Under the name of FairScale's, which has a default for the class."""

    def __init__(
        self,
        params: Iterable[Any],
        optim: type[torch.optim.Optimizer] = torch.optim.SGD,
        group: Any = None,
        broadcast_buffer_size: int = -1,
        broadcast_fp16: bool = False,
        force_broadcast_object: bool = False,
        **default: Any,
    ) -> None:
        super().__init__(params, optim, replicas_of(group), group, **default)

    def consolidate_state_dict(self, recipient_rank: int = 0) -> None:
        super().consolidate_state_dict(to=recipient_rank)


def forked(function: Callable[..., Any], args: tuple[Any, ...] = (), nprocs: int = 1, join: bool = True) -> Any:
    """In place of ``torch.multiprocessing.spawn``: processes that have imported everything."""
    return torch.multiprocessing.start_processes(function, args, nprocs, join, start_method="fork")
