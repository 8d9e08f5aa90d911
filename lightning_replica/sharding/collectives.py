"""The collectives of a step.

The primitive for each backend is chosen here and nowhere else. On gloo (benchmarks/step_time.py measures the whole
step), ranks exchange pieces with all_to_all_single, and give pieces to others with in-place broadcasts. Both are as
fast as hand-made isend / irecv, within noise. Unlike those, they can be waited for in slices: an expired wait on a gloo
point-to-point work closes every connection of the group, an expired wait on a collective leaves it valid
(tests/sharding/test_collectives.py).
"""

from collections.abc import Callable, Iterable

import torch
import torch.distributed as dist
from torch import Tensor

from lightning_replica.core.works import Check, Ordered, Work, track, wait
from lightning_replica.groups.membership import Groups
from lightning_replica.sharding.layout import Bucket


def exchange(bucket: Bucket, grads: Tensor, received: Tensor, groups: Groups) -> Work:
    """Begin to send every member of the grid its piece of this rank's bucket.

    When the work has ended, row j of ``received`` holds the gradients of the rank at place j for this rank's piece.

    Args:
        bucket: The bucket.
        grads: (world_numel,) gradients.
        received: (N * piece_numel,) receives this rank's piece from every member, in order of place.
        groups: The process groups.
    """
    part = grads[bucket.world.start : bucket.world.stop]
    if bucket.is_even:
        return _begun(dist.all_to_all_single(received, part, group=groups.members, async_op=True), groups)
    sent = [piece.numel for piece in bucket.pieces]
    got = [sent[groups.place]] * len(sent)
    return _begun(dist.all_to_all_single(received, part, got, sent, group=groups.members, async_op=True), groups)


def sum_pieces(bucket: Bucket, received: Tensor, grads: Tensor, groups: Groups) -> None:
    """Average the rows of ``received`` into this rank's piece of ``grads``.

    Rows are added up in order of place, in 32 bits if they have 16.
    """
    piece = bucket.pieces[groups.place]
    own = grads[piece.start : piece.stop]
    rows = received[: groups.grid.size * piece.numel].view(groups.grid.size, piece.numel)
    if own.dtype in (torch.float16, torch.bfloat16):
        own.copy_(torch.sum(rows, 0, dtype=torch.float32).div_(len(rows)))
    else:
        torch.sum(rows, 0, out=own)
        own.div_(len(rows))


def share_with_peers(bucket: Bucket, grads: Tensor, groups: Groups) -> list[Work]:
    """Begin to send this rank's averaged piece to its peers and to receive theirs, in place."""
    grid = groups.grid
    return _broadcast_pieces(bucket, grads, grid.places_of(groups.shard), grid.ranks.__getitem__, groups.peers, groups)


def gather(bucket: Bucket, flat: Tensor, groups: Groups) -> list[Work]:
    """Begin to fill the bucket's part of ``flat`` from the shards of this replica, in place.

    Args:
        bucket: The bucket.
        flat: (world_numel,) in which the pieces of the own shard are valid.
        groups: The process groups.
    """
    holders = groups.grid.replica_ranks(groups.rank)
    return _broadcast_pieces(
        bucket,
        flat,
        range(groups.grid.size),
        lambda place: holders[groups.grid.shard_at(place)],
        groups.replica,
        groups,
    )


def all_reduce(vector: Tensor, group: dist.ProcessGroup, check: Check) -> None:
    """Add up ``vector`` over ``group``, in place; every rank gets the same bits."""
    wait(dist.all_reduce(vector, group=group, async_op=True), check)


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
    for place in pieces:
        where = bucket.pieces[place]
        if where.numel:
            part = flat[where.start : where.stop]
            works.append(_begun(dist.broadcast(part, source(place), group=group, async_op=True), groups))
    return works


def _begun(work: "dist.Work | None", groups: Groups) -> Work:
    """Track a collective on gradients or parameters that has begun."""
    return track(work) if groups.on_host or work is None else Ordered(work)
