"""The stages of a bucket's reduction: one for each level on which gradients are added up, and one for the peers.

[Note: two levels]
What costs between nodes is the number of bytes that leave a *node*. If every rank sent its pieces to all others, that
would grow with the ranks on a node. So gradients are added up on two levels:

1. The ranks of a node add up among themselves. The rank at position l of a node gets the node's sum of block l (see
   [Note: pieces] in layout.py), the rows in order of position.
2. The ranks at position l of all nodes exchange the pieces of block l. Each adds up its own piece, in order of node.

Then every rank sends its piece to its peers, which stand on other nodes. The parameter gather goes the other way round:
between nodes first, then on the node (gathering.py). With p bytes per parameter and g per gradient,
[g (M + R - 2) + p (M - R)] / M bytes per element leave a node, however many ranks it has.

Every element is still summed in one fixed tree, at one rank. The tree follows from N and M in the grid. So the bits do
not depend on R, on shared memory, or on the machine where a replacement runs (tests/sharding/test_levels.py). One node,
or one rank on every node, has one level.

Sums of 16-bit gradients are made in 32 bits, and rounded to 16 after each level. They are then divided by the number of
rows, so that no sum overflows where the average does not. Sums of wider gradients are divided by N at the end.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from lightning_replica.core.works import Work
from lightning_replica.groups.membership import Groups
from lightning_replica.sharding import collectives
from lightning_replica.sharding.buffers import Buffers
from lightning_replica.sharding.layout import Bucket, Range
from lightning_replica.sharding.shared import SharedMemory

IN_FLIGHT = 64
"""Number of buckets that may be in one stage at a time; a level has a receive buffer for each of them."""


@dataclass
class Job:
    """One bucket whose reduction is not finished.

    Attributes:
        buffers: The buffers.
        bucket: The bucket.
        missing: Number of parameters that still have no gradient.
        begun: Whether it has been sent.
        works: The collectives of the stage under way.
        room: What they receive into.
    """

    buffers: Buffers
    bucket: Bucket
    missing: int
    begun: bool = False
    works: list[Work] = field(default_factory=list)
    room: Tensor | None = None


class Stage(Protocol):
    """One stage, which all buckets go through in the same order on all ranks."""

    pool: list[Tensor]
    """Receive buffers that are kept, so that steps need not allocate them."""

    def begin(self, job: Job) -> None:
        """Begin the collectives of a bucket, and put them into ``job.works``."""

    def end(self, job: Job) -> None:
        """Use what has arrived. Called when ``job.works`` have ended."""


@dataclass(frozen=True)
class Level:
    """The ranks that add up a range of the flat gradients.

    Attributes:
        group: Their process group.
        place: This rank's place in it.
        parts: Returns the adjacent ranges of a bucket that the members add up, in their order.
        divisor: What sums are divided by.
        narrow_divisor: What sums of 16-bit gradients are divided by.
    """

    group: dist.ProcessGroup
    place: int
    parts: Callable[[Bucket], Sequence[Range]]
    divisor: int
    narrow_divisor: int

    def divisor_of(self, dtype: torch.dtype) -> int:
        """Return what the sum of gradients of this dtype is divided by."""
        return self.narrow_divisor if dtype.itemsize == 2 else self.divisor

    def own(self, bucket: Bucket) -> Range:
        """Return the range of a bucket that this rank adds up."""
        return self.parts(bucket)[self.place]


def levels_of(groups: Groups) -> list[Level]:
    """Return the levels on which gradients are added up, in order."""
    grid, local = groups.grid, groups.grid.local_of(groups.rank)
    levels = []
    if groups.node is not None:
        divisor = 1 if grid.nodes > 1 else grid.size
        levels.append(Level(groups.node, local, lambda bucket: bucket.blocks, divisor, grid.local_size))
    if groups.counterparts is not None:
        levels.append(
            Level(
                groups.counterparts,
                grid.node_of(groups.rank),
                lambda bucket: bucket.pieces[local :: grid.local_size],
                grid.size,
                grid.nodes,
            )
        )
    return levels


class Exchange:
    """Adds up gradients of one level: every member sends the others their parts.

    Args:
        level: The level.
        on_host: See `Groups.on_host`.
    """

    def __init__(self, level: Level, on_host: bool) -> None:
        self._level, self._on_host = level, on_host
        self.pool: list[Tensor] = []

    def begin(self, job: Job) -> None:
        """Begin to send the other members their parts of the bucket."""
        level, grads = self._level, job.buffers.grads
        job.room = self._room(job)
        received = job.room[: level.own(job.bucket).numel * level.group.size()]
        parts = level.parts(job.bucket)
        job.works = [collectives.exchange(grads, parts, received, level.group, self._on_host)]

    def end(self, job: Job) -> None:
        """Add up the own part."""
        level, where, room = self._level, self._level.own(job.bucket), job.room
        if room is None:
            return
        rows = room[: where.numel * level.group.size()].view(level.group.size(), where.numel)
        grads = job.buffers.grads
        collectives.add_up(rows, grads[where.start : where.stop], level.divisor_of(grads.dtype))
        self.pool, job.room = [*self.pool, room][-IN_FLIGHT:], None

    def _room(self, job: Job) -> Tensor:
        """Return a buffer for any bucket of the job's flat buffer, so that `IN_FLIGHT` of them serve all buckets."""
        grads = job.buffers.grads
        largest = max(self._level.own(bucket).numel for bucket in job.buffers.layout.buckets)
        numel = largest * self._level.group.size()
        for place, free in enumerate(self.pool):
            if free.dtype == grads.dtype and free.numel() >= numel:
                return self.pool.pop(place)
        return torch.empty(numel, dtype=grads.dtype, device=grads.device)


class SharedSum:
    """Adds up gradients of a node, whose ranks read each other's memory.

    Args:
        level: The level of the node.
        memory: The shared memory.
    """

    def __init__(self, level: Level, memory: SharedMemory) -> None:
        self._level, self._memory = level, memory
        self.pool: list[Tensor] = []

    def begin(self, job: Job) -> None:
        """Signal that the other ranks of the node can read this rank's gradients of the bucket."""
        job.works = [self._memory.signal()]

    def end(self, job: Job) -> None:
        """Add up the own part, which no other rank reads."""
        block = job.buffers.block
        self._memory.add_up(block, self._level.own(job.bucket), self._level.divisor_of(block.grads.dtype))


class Share:
    """Brings a rank's averaged piece to its peers, and theirs to it.

    Args:
        groups: The process groups.
    """

    def __init__(self, groups: Groups) -> None:
        self._groups = groups
        self.pool: list[Tensor] = []

    def begin(self, job: Job) -> None:
        """Begin to gather the pieces of the shard."""
        groups = self._groups
        parts = [job.bucket.pieces[place] for place in groups.grid.places_of(groups.shard)]
        job.works = collectives.collect(job.buffers.grads, parts, groups.peers, groups.on_host)

    def end(self, job: Job) -> None:
        """Do nothing: the pieces have arrived in place."""


def stages_of(groups: Groups, memory: SharedMemory | None) -> list[Stage]:
    """Return the stages of a reduction, in order.

    Args:
        groups: The process groups.
        memory: The shared memory of the node, if its ranks can read each other's memory.
    """
    stages: list[Stage] = [
        SharedSum(level, memory)
        if memory is not None and level.group is groups.node
        else Exchange(level, groups.on_host)
        for level in levels_of(groups)
    ]
    return [*stages, Share(groups)]
