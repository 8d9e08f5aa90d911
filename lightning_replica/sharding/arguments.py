"""Checks of what `ReplicaOptimizer` is given, with advice for users of torch's and FairScale's optimizers."""

import inspect
from collections.abc import Mapping

import torch
import torch.distributed as dist
from torch import Tensor
from torch.optim import Optimizer

from lightning_replica.errors import ConfigurationError

# Arguments of ZeroRedundancyOptimizer and OSS that have no counterpart of the same name.
_OF_OTHERS = {
    "overlap_with_ddp": "DDP's hooks make no updates here. Register no `hook_with_zero_step`, and call `step()` after"
    " `backward()`: docs/migration.md says what that costs",
    "parameters_as_bucket_view": "parameters are always views into flat buffers",
    "group": "the ranks are `process_group=`",
    "broadcast_buffer_size": "parameters are sent from where they lie",
    "broadcast_fp16": "parameters are gathered in their own dtype, without loss",
    "force_broadcast_object": "the state of the optimizer is gathered as tensors",
}


def check_optimizer_class(optimizer_class: object, defaults: Mapping[str, object]) -> None:
    """Refuse what is no class of an optimizer, and arguments of other sharded optimizers that it does not take.

    Raises:
        ConfigurationError: If either is given.
    """
    if not (isinstance(optimizer_class, type) and issubclass(optimizer_class, Optimizer)):
        raise ConfigurationError(f"{optimizer_class=} must be a class of torch.optim, such as torch.optim.AdamW.")
    taken = inspect.signature(optimizer_class).parameters
    for name in defaults:
        if name in _OF_OTHERS and name not in taken:
            raise ConfigurationError(f"{name}={defaults[name]!r}: {_OF_OTHERS[name]}. Leave the argument out.")


def group_of(process_group: object) -> dist.ProcessGroup:
    """Return the process group, or the default group for None.

    Raises:
        ConfigurationError: If there is no such group, or this rank is not in it.
    """
    if process_group is None:
        if not dist.is_initialized():
            raise ConfigurationError("There is no process group: call `torch.distributed.init_process_group` before.")
        process_group = dist.group.WORLD
    if process_group == dist.GroupMember.NON_GROUP_MEMBER:
        raise ConfigurationError(
            f"Rank {dist.get_rank()} is not in the process group. Make the optimizer on the ranks of the group only."
        )
    if not isinstance(process_group, dist.ProcessGroup):
        raise ConfigurationError(
            f"{process_group=} must be a process group, as `torch.distributed.new_group` returns it, or None."
        )
    return process_group


def check_dense(params: object) -> None:
    """Refuse parameters that have no flat storage.

    Args:
        params: What a param group holds: a parameter, or several, with or without names. Anything else is torch's to
            refuse.

    Raises:
        ConfigurationError: If there is a parameter of another layout.
    """
    for entry in params if isinstance(params, list) else [params]:
        parameter = entry[1] if isinstance(entry, tuple) else entry
        if isinstance(parameter, Tensor) and parameter.layout != torch.strided:
            raise ConfigurationError(
                f"A parameter of shape {tuple(parameter.shape)} has layout {parameter.layout}, but parameters live in"
                " flat, dense buffers. Give it to an optimizer of its own. (Sparse gradients of dense parameters are"
                " fine.)"
            )
