"""Gathers: every rank receives all parameters, or all gradients, from the ranks of its replica.

See [Note: two levels] in levels.py: pieces go between nodes first, then the ranks of a node bring each other their
blocks. Where replicas do not fill nodes, there is one level.
"""

from collections.abc import Sequence
from typing import TypeAlias

from torch import Tensor

from lightning_replica.core.points import reach
from lightning_replica.core.works import Check, Work, wait
from lightning_replica.groups.membership import Groups
from lightning_replica.sharding import collectives
from lightning_replica.sharding.buffers import Buffers
from lightning_replica.sharding.layout import Bucket
from lightning_replica.sharding.shared import SharedMemory

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
        works = [_in_replica(bucket, flat, groups) for bucket, flat in parts]
    else:
        works = []
        under_way = [_between_nodes(bucket, flat, groups) for bucket, flat in parts]
        for (bucket, flat), between in zip(parts, under_way, strict=True):
            _wait(between, check)
            works.append(collectives.collect(flat, bucket.blocks, groups.node, groups.on_host))
    for number, each in enumerate(works):
        _wait(each, check)
        if number == 0 and is_in_step:
            reach("gather")


def gather_blocks(parts: Sequence[Part], groups: Groups, check: Check) -> None:
    """Do the first half of `gather`: fill the own block of every bucket, where replicas fill nodes. Collective."""
    for works in [_between_nodes(bucket, flat, groups) for bucket, flat in parts]:
        _wait(works, check)


def gather_parameters(active: Sequence[Buffers], groups: Groups, check: Check, memory: SharedMemory | None) -> None:
    """Fill ``params`` of every buffer from ``main`` of all shards. Collective.

    Args:
        active: The buffers.
        groups: The process groups.
        check: Raises when waiting has become pointless.
        memory: The shared memory, if the ranks of this node can read each other's memory.
    """
    grid = groups.grid
    if memory is not None and grid.nodes in (1, grid.replicas):
        _read(active, memory)
        return
    for buffers in active:
        buffers.params_from_main()
    parts = [(bucket, buffers.params) for buffers in active for bucket in buffers.layout.buckets]
    if memory is None or not grid.replicas_fill_nodes:
        gather(parts, groups, check, is_in_step=True)
        return
    gather_blocks(parts, groups, check)
    memory.fence()
    for number, (buffers, bucket) in enumerate([(b, bucket) for b in active for bucket in b.layout.buckets]):
        for position, block in enumerate(bucket.blocks):
            memory.take("params", buffers.block, block, position)
        if number == 0:
            reach("gather")
    memory.release()
    memory.reclaim()


def _read(active: Sequence[Buffers], memory: SharedMemory) -> None:
    memory.fence()
    for number, (buffers, bucket) in enumerate([(b, bucket) for b in active for bucket in b.layout.buckets]):
        memory.gather(buffers.block, bucket, buffers.params)
        if number == 0:
            reach("gather")
    memory.release()


def _in_replica(bucket: Bucket, flat: Tensor, groups: Groups) -> list[Work]:
    """Begin the gather of a bucket in one level: one collective for each replica that a shard has pieces of."""
    shards, places = groups.grid.shards, range(groups.grid.size)
    return [
        work
        for first in range(0, groups.grid.size, shards)
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


def _wait(works: Sequence[Work], check: Check) -> None:
    for work in works:
        wait(work, check)
