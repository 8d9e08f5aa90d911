"""The collectives that a step is made of.

Which primitive serves which backend is chosen here and nowhere else. On gloo (benchmarks/step_time.py shows the
whole step): all_to_all_single for the exchange of pieces and in-place broadcasts for everything that is given to
others come within noise of hand-made isend / irecv, and unlike those they can be waited for in slices: an expired
wait on a gloo point-to-point work closes every connection of the group, an expired wait on a collective leaves
it valid (tests/sharding/test_collectives.py).
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import Tensor

from lightning_replica.errors import CollectiveError
from lightning_replica.grid import Grid
from lightning_replica.sharding.layout import Bucket
from lightning_replica.works import Check, Ordered, Work, track, wait


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
        on_host: Whether gradients and parameters lie in the host's memory. Otherwise collectives on them are put in
            order on the device (`works.Ordered`); those that are the host's own are waited for all the same.
    """

    grid: Grid
    rank: int
    world: dist.ProcessGroup
    replica: dist.ProcessGroup
    peers: dist.ProcessGroup
    on_host: bool = True

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


def make_groups(grid: Grid, rank: int, timeout: timedelta, on_host: bool = True) -> Groups:
    """Makes the groups inside the initialised default group. Collective: every rank calls it."""

    def new(ranks: tuple[int, ...]) -> dist.ProcessGroup:
        group = dist.new_group(list(ranks), timeout=timeout, use_local_synchronization=True)
        if group is None or isinstance(group, int):
            raise CollectiveError(f"rank {rank} is not in the process group of {ranks=}")
        found: dist.ProcessGroup = group
        return found

    everyone = dist.new_group(list(range(grid.world_size)), timeout=timeout)
    return Groups(grid, rank, everyone, new(grid.replica_ranks(rank)), new(grid.peers(rank)), on_host)


def exchange(bucket: Bucket, grads: Tensor, received: Tensor, groups: Groups) -> Work:
    """Sends every rank its piece of this rank's bucket; afterwards row j of ``received`` is rank j's part of ours.

    Args:
        bucket: The bucket.
        grads: (world_numel,) gradients.
        received: (N * piece_numel,) gets this rank's piece from everyone, in order of rank.
        groups: The process groups.
    """
    part = grads[bucket.world.start : bucket.world.stop]
    if bucket.is_even:
        return _begun(dist.all_to_all_single(received, part, group=groups.world, async_op=True), groups)
    sent = [piece.numel for piece in bucket.pieces]
    got = [sent[groups.rank]] * len(sent)
    return _begun(dist.all_to_all_single(received, part, got, sent, group=groups.world, async_op=True), groups)


def sum_pieces(bucket: Bucket, received: Tensor, grads: Tensor, groups: Groups) -> None:
    """Averages the rows of ``received`` into this rank's piece of ``grads``; added up in order of rank, in 32 bits."""
    piece = bucket.pieces[groups.rank]
    own = grads[piece.start : piece.stop]
    rows = received[: groups.grid.world_size * piece.numel].view(groups.grid.world_size, piece.numel)
    if own.dtype in (torch.float16, torch.bfloat16):
        own.copy_(torch.sum(rows, 0, dtype=torch.float32).div_(len(rows)))
    else:
        torch.sum(rows, 0, out=own)
        own.div_(len(rows))


def share_with_peers(bucket: Bucket, grads: Tensor, groups: Groups) -> list[Work]:
    """Gives this rank's averaged piece to its peers and gets theirs, in place."""
    return _broadcast_pieces(bucket, grads, groups.grid.peers(groups.rank), lambda rank: rank, groups.peers, groups)


def gather(bucket: Bucket, flat: Tensor, groups: Groups) -> list[Work]:
    """Fills the bucket's part of ``flat`` from the shards of this replica, in place.

    Args:
        bucket: The bucket.
        flat: (world_numel,) in which the pieces of the own shard are valid.
        groups: The process groups.
    """
    holders = groups.grid.replica_ranks(groups.rank)
    return _broadcast_pieces(
        bucket,
        flat,
        range(groups.grid.world_size),
        lambda rank: holders[groups.grid.shard_of(rank)],
        groups.replica,
        groups,
    )


def all_reduce(vector: Tensor, groups: Groups, check: Check) -> None:
    """Adds up ``vector`` over the world, in place; every rank gets the same bits."""
    wait(dist.all_reduce(vector, group=groups.world, async_op=True), check)


def all_gather_bytes(payload: bytes, group: dist.ProcessGroup, check: Check) -> list[bytes]:
    """Every rank's payload, by rank of the group. Collective over ``group``."""
    sizes = [torch.zeros(1, dtype=torch.int64) for _ in range(group.size())]
    wait(dist.all_gather(sizes, torch.tensor([len(payload)]), group=group, async_op=True), check)
    longest = max(int(size) for size in sizes)
    message = torch.zeros(longest, dtype=torch.uint8)
    message[: len(payload)] = torch.frombuffer(bytearray(payload), dtype=torch.uint8)
    rows = [torch.empty_like(message) for _ in sizes]
    wait(dist.all_gather(rows, message, group=group, async_op=True), check)
    return [row[: int(size)].numpy().tobytes() for row, size in zip(rows, sizes, strict=True)]


def _broadcast_pieces(
    bucket: Bucket,
    flat: Tensor,
    pieces: Iterable[int],
    source: Callable[[int], int],
    group: dist.ProcessGroup,
    groups: Groups,
) -> list[Work]:
    works: list[Work] = []
    if group.size() == 1:
        return works
    for rank in pieces:
        where = bucket.pieces[rank]
        if where.numel:
            part = flat[where.start : where.stop]
            works.append(_begun(dist.broadcast(part, source(rank), group=group, async_op=True), groups))
    return works


def _begun(work: "dist.Work | None", groups: Groups) -> Work:
    """A collective on gradients or parameters."""
    return track(work) if groups.on_host or work is None else Ordered(work)
