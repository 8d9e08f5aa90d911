"""The process groups that one rank is in."""

from dataclasses import dataclass
from datetime import timedelta

import torch.distributed as dist

from lightning_replica.core.grid import Grid
from lightning_replica.errors import CollectiveError


@dataclass(frozen=True)
class Groups:
    """The process groups of one rank in one generation.

    Reductions use a group of their own, not the default group. So a message that a LightningModule sends on the
    default group during backward can never fall between two buckets.

    Attributes:
        grid: The table of ranks.
        rank: This rank.
        world: All N ranks; carries reductions and the commit.
        replica: The S ranks of this replica; carries the parameter gather.
        peers: The R holders of this rank's shard; carries reduced pieces and mirrors.
        on_host: Whether gradients and parameters lie in the host's memory. If not, collectives on them are put in
            order on the device (`works.Ordered`). The rank waits for collectives on the host's tensors in both cases.
    """

    grid: Grid
    rank: int
    world: dist.ProcessGroup
    replica: dist.ProcessGroup
    peers: dist.ProcessGroup
    on_host: bool = True

    @property
    def shard(self) -> int:
        """The number of this rank's shard."""
        return self.grid.shard_of(self.rank)

    @property
    def replica_index(self) -> int:
        """The number of this rank's replica."""
        return self.grid.replica_of(self.rank)

    def all(self) -> tuple[dist.ProcessGroup, ...]:
        """Return all three groups."""
        return (self.world, self.replica, self.peers)


def make_groups(grid: Grid, rank: int, timeout: timedelta, on_host: bool = True) -> Groups:
    """Make this rank's groups inside the initialised default group. Collective: every rank calls it."""

    def new(ranks: tuple[int, ...]) -> dist.ProcessGroup:
        group = dist.new_group(list(ranks), timeout=timeout, use_local_synchronization=True)
        if group is None or isinstance(group, int):
            raise CollectiveError(f"rank {rank} is not in the process group of {ranks=}")
        found: dist.ProcessGroup = group
        return found

    everyone = dist.new_group(list(range(grid.world_size)), timeout=timeout)
    return Groups(grid, rank, everyone, new(grid.replica_ranks(rank)), new(grid.peers(rank)), on_host)
