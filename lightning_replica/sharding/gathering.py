"""Gathers: every rank receives all parameters, or all gradients, from the ranks of its replica.

See [Note: two levels] in levels.py: pieces go between nodes first, then the ranks of a node bring each other their
blocks. Where replicas do not fill nodes, there is one level.
"""

from collections.abc import Sequence
from typing import Literal, TypeAlias, TypeVar

from torch import Tensor

from lightning_replica.core.pending_work import Check, Work, wait
from lightning_replica.core.points import reach
from lightning_replica.groups.membership import Groups
from lightning_replica.sharding import collectives
from lightning_replica.sharding.buffers import Buffers
from lightning_replica.sharding.layout import Bucket
from lightning_replica.sharding.shared import SharedMemory
from lightning_replica.sharding.values import Values

Stored = TypeVar("Stored", bound=Values)
Part: TypeAlias = tuple[Bucket, Tensor]
"""A bucket, and the (world_numel,) tensor that it is a part of, in which the pieces of the own shard are valid."""


def gather(parts: Sequence[Part], groups: Groups, check: Check, is_in_step: bool = False) -> None:
    """Fill buckets from the shards of this replica, in place. Collective.

    Args:
        parts: The buckets.
        groups: The process groups.
        check: Raises when waiting has become pointless.
        is_in_step: Whether this is the parameter gather of a step, which has a point of its own.
    """
    if not groups.grid.replicas_fill_nodes:
        pending = [_in_replica(bucket, flat, groups) for bucket, flat in parts]
    else:
        pending = []
        under_way = [_between_nodes(bucket, flat, groups) for bucket, flat in parts]
        for (bucket, flat), between in zip(parts, under_way, strict=True):
            _wait(between, check)
            pending.append(collectives.collect(flat, bucket.blocks, groups.node, groups.on_host))
    for number, each in enumerate(pending):
        _wait(each, check)
        if number == 0 and is_in_step:
            reach("gather")


def gather_parameters(active: Sequence[Values], groups: Groups, check: Check, memory: SharedMemory | None) -> None:
    """Fill ``params`` of every buffer from ``main`` of all shards. Collective.

    Args:
        active: The buffers.
        groups: The process groups.
        check: Raises when waiting has become pointless.
        memory: The shared memory, if the ranks of this node can read each other's memory.
    """
    grid = groups.grid
    if memory is not None and grid.nodes in (1, grid.replicas):
        _read_shards(active, memory)
        return
    for buffers in active:
        buffers.params_from_main()
    if memory is None or not grid.replicas_fill_nodes:
        gather([(bucket, buffers.params) for buffers, bucket in _buckets(active)], groups, check, is_in_step=True)
        return
    _gather_through("params", active, groups, check, memory)
    memory.release()
    memory.reclaim()


def gather_gradients(active: Sequence[Buffers], groups: Groups, check: Check, memory: SharedMemory | None) -> None:
    """Make all of ``grads`` the averaged gradient, as under DDP. Called after a reduction. Collective.

    The arguments are those of `gather_parameters`.
    """
    grid = groups.grid
    if memory is not None and grid.nodes == 1:
        memory.fence()
        holders = grid.replica_places(groups.rank)
        for buffers, bucket in _buckets(active):
            for place, piece in enumerate(bucket.pieces):
                memory.take("grads", buffers.block, piece, holders[grid.shard_at(place)])
    elif memory is not None and grid.replicas_fill_nodes:
        _gather_through("grads", active, groups, check, memory)
    else:
        gather([(bucket, buffers.grads) for buffers, bucket in _buckets(active)], groups, check)


def _gather_through(
    kind: Literal["grads", "params"], active: Sequence[Values], groups: Groups, check: Check, memory: SharedMemory
) -> None:
    """Gather between nodes, then read the blocks of the other ranks of this node. Replicas fill nodes."""
    buckets = _buckets(active)
    for pending in [_between_nodes(bucket, getattr(buffers, kind), groups) for buffers, bucket in buckets]:
        _wait(pending, check)
    memory.fence()
    for number, (buffers, bucket) in enumerate(buckets):
        for position, block in enumerate(bucket.blocks):
            memory.take(kind, buffers.block, block, position)
        if number == 0 and kind == "params":
            reach("gather")


def _read_shards(active: Sequence[Values], memory: SharedMemory) -> None:
    """Read the shards of this replica, which is all on this node."""
    memory.fence()
    for number, (buffers, bucket) in enumerate(_buckets(active)):
        memory.gather(buffers.block, bucket, buffers.params)
        if number == 0:
            reach("gather")
    memory.release()


def _buckets(active: Sequence[Stored]) -> list[tuple[Stored, Bucket]]:
    return [(buffers, bucket) for buffers in active for bucket in buffers.layout.buckets]


def _in_replica(bucket: Bucket, flat: Tensor, groups: Groups) -> list[Work]:
    """Begin the gather of a bucket in one level: one collective for each replica that a shard has pieces of."""
    shards, places = groups.grid.shards, range(len(bucket.pieces))
    return [
        work
        for first in range(0, len(places), shards)
        for work in collectives.collect(
            flat, [bucket.pieces[place] for place in places[first : first + shards]], groups.replica, groups.on_host
        )
    ]


def _between_nodes(bucket: Bucket, flat: Tensor, groups: Groups) -> list[Work]:
    """Begin to fill the own block of a bucket from the nodes of this replica."""
    grid = groups.grid
    own = bucket.pieces[grid.local_of(groups.rank) :: grid.local_size]
    nodes = grid.nodes // grid.replicas  # of a replica
    return [
        work
        for first in range(0, grid.nodes, nodes)
        for work in collectives.collect(flat, own[first : first + nodes], groups.replica_counterparts, groups.on_host)
    ]


def _wait(pending: Sequence[Work], check: Check) -> None:
    for work in pending:
        wait(work, check)
