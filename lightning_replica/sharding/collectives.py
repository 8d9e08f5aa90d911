"""The collectives that a step is made of.

Which primitive serves which backend is chosen here and nowhere else. On gloo (benchmarks/step_time.py shows the
whole step): all_to_all_single for the exchange of pieces and in-place broadcasts for everything that is given to
others come within noise of hand-made isend / irecv, and unlike those they can be waited for in slices: an expired
wait on a gloo point-to-point work closes every connection of the group, an expired wait on a collective leaves
it valid (tests/sharding/test_collectives.py).
"""

from dataclasses import dataclass
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import Tensor

from lightning_replica.errors import CollectiveError
from lightning_replica.grid import Grid
from lightning_replica.sharding.layout import Bucket
from lightning_replica.works import Check, Work, track, wait


@dataclass(frozen=True)
class Groups:
    """The process groups of one rank in one generation.

    Reductions have a group of their own beside the default one, so that what a LightningModule sends on the
    default group during backward can never fall between two buckets.

    Attributes:
        grid: The table of ranks.
        rank: This rank.
        world: All N ranks; carries reductions and the commit.
        replica: The S ranks of this replica; carries the parameter gather.
        peers: The R holders of this rank's shard; carries reduced pieces and mirrors.
    """

    grid: Grid
    rank: int
    world: dist.ProcessGroup
    replica: dist.ProcessGroup
    peers: dist.ProcessGroup

    @property
    def shard(self) -> int:
        """This rank's shard."""
        return self.grid.shard_of(self.rank)

    @property
    def replica_index(self) -> int:
        """This rank's replica."""
        return self.grid.replica_of(self.rank)

    def all(self) -> tuple[dist.ProcessGroup, ...]:
        """Every group."""
        return (self.world, self.replica, self.peers)


def make_groups(grid: Grid, rank: int, timeout_s: float) -> Groups:
    """Makes the groups inside the initialised default group. Collective: every rank calls it."""
    timeout = timedelta(seconds=timeout_s)

    def new(ranks: tuple[int, ...]) -> dist.ProcessGroup:
        group = dist.new_group(list(ranks), timeout=timeout, use_local_synchronization=True)
        if group is None or isinstance(group, int):
            raise CollectiveError(f"rank {rank} is not in the process group of {ranks=}")
        found: dist.ProcessGroup = group
        return found

    everyone = dist.new_group(list(range(grid.world_size)), timeout=timeout)
    return Groups(grid, rank, everyone, new(grid.replica_ranks(rank)), new(grid.peers(rank)))


def exchange(bucket: Bucket, grads: Tensor, received: Tensor, groups: Groups) -> Work:
    """Sends every rank its piece of this rank's bucket; afterwards row j of ``received`` is rank j's part of ours.

    Args:
        bucket: The bucket.
        grads: (world_numel,) gradients.
        received: (N * piece_numel,) gets the pieces, in order of rank.
        groups: The process groups.
    """
    part = grads[bucket.world.start : bucket.world.stop]
    return track(dist.all_to_all_single(received, part, group=groups.world, async_op=True))


def sum_pieces(bucket: Bucket, received: Tensor, out: Tensor) -> None:
    """Adds up the rows of ``received`` in order of rank into ``out``, (piece_numel,)."""
    torch.sum(received.view(-1, bucket.piece_numel), 0, out=out)


def share_with_peers(bucket: Bucket, main_grads: Tensor, groups: Groups) -> list[Work]:
    """Gives this rank's summed piece to its peers and gets theirs, in place."""
    works: list[Work] = []
    if groups.grid.replicas == 1:
        return works
    for replica, source in enumerate(groups.grid.peers(groups.rank)):
        where = bucket.local(replica)
        piece = main_grads[where.start : where.stop]
        works.append(track(dist.broadcast(piece, source, group=groups.peers, async_op=True)))
    return works


def gather(bucket: Bucket, params: Tensor, groups: Groups) -> list[Work]:
    """Fills the bucket's parameters from the shards of this replica, in place."""
    works: list[Work] = []
    if groups.grid.shards == 1:
        return works
    for replica in range(groups.grid.replicas):
        for shard, source in enumerate(groups.grid.replica_ranks(groups.rank)):
            where = bucket.piece(replica * groups.grid.shards + shard)
            piece = params[where.start : where.stop]
            works.append(track(dist.broadcast(piece, source, group=groups.replica, async_op=True)))
    return works


def all_reduce(vector: Tensor, groups: Groups, check: Check) -> None:
    """Adds up ``vector`` over the world, in place; every rank gets the same bits."""
    wait(dist.all_reduce(vector, group=groups.world, async_op=True), check)
