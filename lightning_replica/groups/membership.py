"""The process groups that one rank is in.

[Note: one commit, several grids]
There is one commit for the world; everything else belongs to a grid. Where one grid has all ranks, as under
`replica_zero`, the group of its members is the world's group. The commit then also carries what the members tell each
other. Where a world has several grids, the members of each tell each other before the commit. So the commit is the same
on all grids, and a rank can roll forward with the commit of any other rank (tests/sharding/test_grids.py). A rank that
is in two grids has groups of both.
"""

import itertools
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from datetime import timedelta

import torch
import torch.distributed as dist

from lightning_replica._compat.groups import open_group_within
from lightning_replica.core.grid import Grid
from lightning_replica.devices.host import HOST
from lightning_replica.errors import CollectiveError


@dataclass(frozen=True)
class Groups:
    """The process groups of one rank in one generation.

    Reductions use a group of their own, not the default group. So a message that a LightningModule sends on the
    default group during backward can never fall between two buckets.

    Attributes:
        grid: The table of the ranks among which the state is sharded.
        rank: This rank.
        world: All ranks; carries the commit.
        members: The N ranks of the grid.
        replica: The S ranks of this replica.
        node: The L ranks of this rank's node; carries what does not leave the node. On one node, the group ``members``.
            None if this rank is the only one on its node.
        counterparts: The M ranks that have this rank's position on their nodes; carries reductions between nodes. None
            on one node.
        replica_counterparts: Those of them that belong to this replica; carries the parameter gather between nodes.
            None if this rank is the only one.
        peers: The R holders of this rank's shard; carries reduced pieces and mirrors.
        on_host: Whether gradients and parameters lie in the host's memory. If not, collectives on them are put in
            order on the device (`pending_work.Ordered`). The rank waits for collectives on the host's tensors in both
            cases.
        others: The groups of the further grids that the rank is in.
    """

    grid: Grid
    rank: int
    world: dist.ProcessGroup
    members: dist.ProcessGroup
    replica: dist.ProcessGroup
    peers: dist.ProcessGroup
    node: dist.ProcessGroup | None
    counterparts: dist.ProcessGroup | None = None
    replica_counterparts: dist.ProcessGroup | None = None
    on_host: bool = True
    others: tuple["Groups", ...] = ()

    @property
    def of_grids(self) -> tuple["Groups", ...]:
        """The groups of each grid that the rank is in, these first."""
        return (self, *self.others)

    @property
    def place(self) -> int:
        """This rank's place in the grid."""
        return self.grid.place_of(self.rank)

    @property
    def commit_is_shared(self) -> bool:
        """Whether ranks of other grids take part in the commit. See [Note: one commit, several grids]."""
        return self.members is not self.world

    @property
    def shard(self) -> int:
        """The number of this rank's shard."""
        return self.grid.shard_of(self.rank)

    @property
    def replica_index(self) -> int:
        """The number of this rank's replica."""
        return self.grid.replica_of(self.rank)

    def all(self) -> tuple[dist.ProcessGroup, ...]:
        """Return every group once."""
        optional = (self.node, self.counterparts, self.replica_counterparts)
        named = (self.world, self.members, self.replica, self.peers, *optional)
        further = (group for other in self.others for group in other.all())
        return tuple(dict.fromkeys(group for group in (*named, *further) if group is not None))


def make_groups(grid: Grid, rank: int, timeout: timedelta, on_host: bool = True, others: Sequence[Grid] = ()) -> Groups:
    """Make this rank's groups inside the initialised default group. Collective: every rank calls it.

    Args:
        grid: The grid of this rank.
        rank: This rank.
        timeout: Time after which a collective fails by itself.
        on_host: Whether gradients and parameters lie in the host's memory.
        others: The further grids that this rank is in. Its peers are the same in all of them.
    """
    world = dist.new_group(list(range(dist.get_world_size())), timeout=timeout)

    # A group of peers for each grid, too: what one grid sends must not fall between two buckets of another.
    def new(ranks: tuple[int, ...]) -> dist.ProcessGroup:
        group = dist.new_group(list(ranks), timeout=timeout, use_local_synchronization=True)
        if group is None or isinstance(group, int):
            raise CollectiveError(f"rank {rank} is not in the process group of {ranks=}")
        found: dist.ProcessGroup = group
        return found

    first, *further = [_of_grid(each, rank, on_host, world, new) for each in (grid, *others)]
    return replace(first, others=tuple(further))


def groups_within(group: dist.ProcessGroup, replicas: int, timeout: timedelta, on_host: bool) -> Groups:
    """Make the groups of a grid of the ranks of ``group``. Collective over ``group``.

    Args:
        group: The ranks.
        replicas: Number of holders of each shard, R.
        timeout: Time after which a collective fails by itself.
        on_host: Whether parameters lie in the host's memory.

    Raises:
        ConfigurationError: If R does not divide the number of ranks.
    """
    grid = Grid(tuple(dist.get_process_group_ranks(group)), replicas)
    where = HOST if on_host else torch.accelerator.current_accelerator()
    agreed = torch.tensor([random.SystemRandom().getrandbits(62)], device=where)  # as no other group has been named
    dist.broadcast(agreed, grid.ranks[0], group)
    prefix, numbers = f"lightning_replica/{int(agreed)}", itertools.count()

    def new(ranks: tuple[int, ...]) -> dist.ProcessGroup:
        return open_group_within(group, ranks, f"{prefix}/{next(numbers)}/{ranks}", timeout)

    return _of_grid(grid, dist.get_rank(), on_host, group, new)


def _of_grid(
    grid: Grid,
    rank: int,
    on_host: bool,
    world: dist.ProcessGroup,
    new: Callable[[tuple[int, ...]], dist.ProcessGroup],
) -> Groups:
    members = world if grid.ranks == tuple(range(dist.get_world_size())) else new(grid.ranks)
    replica, peers = new(grid.replica_ranks(rank)), new(grid.peers(rank))
    groups = Groups(grid, rank, world, members, replica, peers, members, on_host=on_host)
    if grid.nodes == 1:
        return groups
    node = new(grid.node_ranks(rank)) if grid.local_size > 1 else None
    counterparts = new(grid.counterparts(rank)) if grid.local_size > 1 else members
    of_replica = tuple(other for other in grid.counterparts(rank) if grid.replica_of(other) == grid.replica_of(rank))
    if not grid.replicas_fill_nodes or len(of_replica) == 1:
        replica_counterparts = None
    else:
        replica_counterparts = counterparts if len(of_replica) == grid.nodes else new(of_replica)
    return replace(groups, node=node, counterparts=counterparts, replica_counterparts=replica_counterparts)
