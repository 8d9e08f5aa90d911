"""What ranks tell each other about their gradients: in the commit, and where gradients are made whole."""

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from lightning_replica.core.pending_work import Check
from lightning_replica.groups.membership import Groups
from lightning_replica.sharding import collectives, usage
from lightning_replica.sharding.buffers import Buffers
from lightning_replica.sharding.commit import Flags, Request, part_of_commit


def vote(
    buffers: Sequence[Buffers],
    used: Sequence[float],
    request: Request,
    flags: Flags = Flags(),  # noqa: B008
    counts_zeros: bool = False,
) -> Tensor:
    """Return one rank's part of the commit vector.

    It covers the rank's own pieces only, so that a shard counts once, although R ranks hold it.

    Args:
        buffers: The buffers whose gradients take part.
        used: What `present` returns for them; empty if the members of the grid have told each other already.
        request: How the gradient is scaled and clipped before the update.
        flags: What this rank says.
        counts_zeros: Whether zeros in the gradient are counted.
    """
    own = [part for each in buffers for part in each.own_gradients()]
    numel = sum(each.counted_numel for each in buffers) if counts_zeros else None
    commit = part_of_commit(own, request, tuple(used), flags, numel)
    return torch.tensor(commit.vector, dtype=torch.float64)


def present(buffers: Sequence[Buffers], groups: Groups) -> list[float]:
    """Return which parameters have a gradient on this rank, packed so that it can be added up over the grid."""
    return usage.pack([flag for each in buffers for flag in each.present()], groups.grid.size)


def add_up(own: Sequence[float], groups: Groups, check: Check) -> tuple[float, ...]:
    """Add up over the grid what `present` has returned. Collective."""
    vector = torch.tensor(own, dtype=torch.float64)
    collectives.all_reduce(vector, groups.members, check)
    return tuple(vector.tolist())


def deal(used: Sequence[float], buffers: Sequence[Buffers], groups: Groups) -> Iterator[tuple[Buffers, list[bool]]]:
    """Return for each of ``buffers`` which of its parameters have a gradient on any rank of the grid."""
    flags = usage.unpack(used, sum(len(each.parameters) for each in buffers), groups.grid.size)
    for each in buffers:
        yield each, flags[: len(each.parameters)]
        flags = flags[len(each.parameters) :]
