"""What ranks tell each other about their gradients: in the commit, and where gradients are made whole."""

from collections.abc import Sequence

import torch
from torch import Tensor

from lightning_replica.core.works import Check
from lightning_replica.groups.membership import Groups
from lightning_replica.sharding import collectives, usage
from lightning_replica.sharding.buffers import Buffers
from lightning_replica.sharding.commit import Commit, Request, part_of_commit


def vote(
    buffers: Sequence[Buffers], world_size: int, request: Request, stop: bool = False, save: bool = False
) -> Tensor:
    """Return one rank's part of the commit vector.

    It covers the rank's own pieces only, so that a shard counts once, although R ranks hold it.

    Args:
        buffers: The buffers whose gradients take part.
        world_size: Number of ranks.
        request: How the gradient is scaled and clipped before the update.
        stop: Whether this rank was asked to stop.
        save: Whether this rank was asked to save.
    """
    own = [part for each in buffers for part in each.own_gradients()]
    present = [flag for each in buffers for flag in each.present()]
    used = tuple(usage.pack(present, world_size))
    return torch.tensor(part_of_commit(own, request, used, stop, save).vector, dtype=torch.float64)


def take_used(buffers: Sequence[Buffers], commit: Commit, world_size: int) -> None:
    """Record in ``buffers`` which parameters have a gradient on any rank, as the commit says."""
    used = usage.unpack(commit.used, sum(len(each.parameters) for each in buffers), world_size)
    for each in buffers:
        each.used, used = used[: len(each.parameters)], used[len(each.parameters) :]


def show_used(buffers: Sequence[Buffers], groups: Groups, check: Check) -> None:
    """Agree on which parameters have a gradient on any rank, and show whole gradients for these only. Collective."""
    world_size = groups.grid.world_size
    present = [flag for each in buffers for flag in each.present()]
    vector = torch.tensor(usage.pack(present, world_size), dtype=torch.float64)
    collectives.all_reduce(vector, groups, check)
    used = usage.unpack(vector.tolist(), len(present), world_size)
    for each in buffers:
        each.show(used[: len(each.parameters)])
        used = used[len(each.parameters) :]
