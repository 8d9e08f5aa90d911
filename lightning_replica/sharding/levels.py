"""The stages of a bucket's reduction: one for each level on which gradients are added up, and one for the peers.

[Note: two levels]
What costs between nodes is the number of bytes that leave a *node*. If every rank sent its pieces to all others, that
would grow with the ranks on a node. So gradients are added up on two levels:

1. The ranks of a node add up among themselves. The rank at position l of a node gets the node's sum of block l (see
   [Note: pieces] in layout.py), the rows in order of position.
2. The ranks at position l of all nodes exchange the pieces of block l. Each adds up its own piece, in order of node.

Then every rank sends its piece to its peers, which stand on other nodes if replicas fill nodes. The parameter gather
goes the other way round: between nodes first, then on the node (gathering.py). With p bytes per parameter and g per
gradient, [g (M + R - 2) + p (M - R)] / M bytes per element leave a node, however many ranks it has.

Every element is summed in one fixed tree, and one rank makes the last of its sums. The tree follows from N and M in the
grid. So the bits do not depend on R, on shared memory, or on the machine where a replacement runs
(tests/sharding/test_levels.py). One node, or one rank on every node, has one level.

Sums of 16-bit gradients are made in 32 bits, and rounded to 16 after each level. They are then divided by the number of
rows, so that no sum overflows where the average does not. Sums of wider gradients are divided by N at the end.

With a `reduce_dtype`, wider gradients are rounded to it before they leave a node, and the averages too, so that all
holders have the same bits. On the node they are added up as they are. So the bits do not depend on shared memory.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import accumulate, pairwise
from typing import Protocol
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch import Tensor

from lightning_replica.core.pending_work import Work
from lightning_replica.groups.membership import Groups
from lightning_replica.sharding import collectives
from lightning_replica.sharding.buffers import Buffers
from lightning_replica.sharding.layout import Bucket, Range
from lightning_replica.sharding.shared import SharedMemory

IN_FLIGHT = 4
"""Number of buckets that may be in one stage at a time; a level has a receive buffer for each of them."""


@dataclass
class Job:
    """One bucket whose reduction is not finished.

    Attributes:
        buffers: The buffers.
        bucket: The bucket.
        missing: Number of parameters that still have no gradient.
        present: The ranks that sums are divided by, of all: two numbers.
        begun: Whether it has been sent.
        pending: The collectives of the stage under way.
        room: What they receive into.
        sent: What they send, if that has another dtype than the gradients.
    """

    buffers: Buffers
    bucket: Bucket
    missing: int
    present: tuple[int, int] = (1, 1)
    begun: bool = False
    pending: list[Work] = field(default_factory=list)
    room: Tensor | None = None
    sent: Tensor | None = None

    def without_absent(self, divisor: float) -> float:
        """Return the divisor that counts only ranks that are present, for one that counts all; exact if it is whole."""
        present, size = self.present
        return divisor * present / size


class Stage(Protocol):
    """One stage, which all buckets go through in the same order on all ranks."""

    @property
    def rooms(self) -> list[Tensor]:
        """Buffers that are kept, so that steps need not allocate them."""

    def begin(self, job: Job) -> None:
        """Begin the collectives of a bucket, and put them into ``job.pending``."""

    def end(self, job: Job) -> None:
        """Use what has arrived. Called when ``job.pending`` have ended."""


@dataclass(frozen=True)
class Level:
    """The ranks that add up a range of the flat gradients.

    Attributes:
        group: Their process group.
        place: This rank's place in it.
        parts: Returns the adjacent ranges of a bucket that the members add up, in their order.
        divisor: What sums are divided by.
        narrow_divisor: What sums of gradients are divided by that are sent in 16 bits on any level.
        is_last: Whether no other level follows.
        wire: The dtype in which gradients are sent; None for their own.
    """

    group: dist.ProcessGroup
    place: int
    parts: Callable[[Bucket], Sequence[Range]]
    divisor: float
    narrow_divisor: float
    is_last: bool
    wire: torch.dtype | None = None

    def own(self, bucket: Bucket) -> Range:
        """Return the range of a bucket that this rank adds up."""
        return self.parts(bucket)[self.place]

    def whole(self, bucket: Bucket) -> Range:
        """Return the range of a bucket that all members add up together."""
        parts = self.parts(bucket)
        return Range(parts[0].start, parts[-1].stop)


def levels_of(groups: Groups, wire: torch.dtype | None) -> list[Level]:
    """Return the levels on which gradients are added up, in order.

    Args:
        groups: The process groups.
        wire: The dtype in which gradients leave a node; None for their own.
    """
    grid, local = groups.grid, groups.grid.local_of(groups.rank)
    levels = []
    if groups.node is not None:
        divisor, narrow = (1, grid.local_size) if grid.nodes > 1 else (grid.divisor, grid.divisor)
        levels.append(Level(groups.node, local, lambda bucket: bucket.blocks, divisor, narrow, grid.nodes == 1))
    if groups.counterparts is not None:
        levels.append(
            Level(
                groups.counterparts,
                grid.node_of(groups.rank),
                lambda bucket: bucket.pieces[local :: grid.local_size],
                grid.divisor,
                grid.divisor / grid.local_size,
                True,
                wire,
            )
        )
    return levels


class Rooms:
    """Buffers for what other ranks send, or for what is sent in another dtype. They are kept for the next steps.

    Args:
        needed: Returns how many elements a bucket needs.
    """

    def __init__(self, needed: Callable[[Bucket], int]) -> None:
        self.kept: list[Tensor] = []
        self._needed = needed
        self._most: WeakKeyDictionary[Buffers, int] = WeakKeyDictionary()

    def take(self, buffers: Buffers, dtype: torch.dtype) -> Tensor:
        """Return room for any bucket of these buffers, so that `IN_FLIGHT` of them serve all buckets."""
        most = self._most.get(buffers)
        if most is None:
            most = self._most[buffers] = max(map(self._needed, buffers.layout.buckets))
        for place, free in enumerate(self.kept):
            if free.dtype == dtype and free.numel() >= most:
                return self.kept.pop(place)
        return torch.empty(most, dtype=dtype, device=buffers.grads.device)

    def give_back(self, room: Tensor) -> None:
        """Keep a buffer that nobody writes into any more."""
        self.kept = [*self.kept, room][-IN_FLIGHT:]


class Exchange:
    """Adds up gradients of one level: every member sends the others their parts.

    Args:
        level: The level.
        narrow: Whether any level sends in 16 bits what has more.
        on_host: See `Groups.on_host`.
    """

    def __init__(self, level: Level, narrow: bool, on_host: bool) -> None:
        self._level, self._narrow, self._on_host = level, narrow, on_host
        self._received = Rooms(lambda bucket: level.own(bucket).numel * level.group.size())
        self._sent = Rooms(lambda bucket: level.whole(bucket).numel)

    @property
    def rooms(self) -> list[Tensor]:
        """See `Stage`."""
        return [*self._received.kept, *self._sent.kept]

    def begin(self, job: Job) -> None:
        """Begin to send the other members their parts of the bucket."""
        level, grads, whole = self._level, job.buffers.grads, self._level.whole(job.bucket)
        numels = [part.numel for part in level.parts(job.bucket)]
        wire = level.wire or grads.dtype
        job.room = self._received.take(job.buffers, wire)
        received = job.room[: numels[level.place] * level.group.size()]
        sent = grads[whole.start : whole.stop]
        if wire != grads.dtype:
            job.sent = self._sent.take(job.buffers, wire)
            sent = job.sent[: whole.numel].copy_(sent)
        job.pending = [collectives.exchange(sent, numels, received, level.group, self._on_host)]

    def end(self, job: Job) -> None:
        """Add up the own part."""
        level, where, room, grads = self._level, self._level.own(job.bucket), job.room, job.buffers.grads
        if room is None:
            return
        rows = room[: where.numel * level.group.size()].view(level.group.size(), where.numel)
        divisor = divisor_of(level, job, self._narrow)
        own = grads[where.start : where.stop]
        collectives.add_up(rows, own, divisor)
        if level.wire is not None and level.wire != grads.dtype:
            own.copy_(own.to(level.wire))
        self._received.give_back(room)
        if job.sent is not None:
            self._sent.give_back(job.sent)
        job.room = job.sent = None


class SharedSum:
    """Adds up gradients of a node, whose ranks read each other's memory.

    Args:
        level: The level of the node.
        memory: The shared memory.
        narrow: Whether any level sends in 16 bits what has more.
    """

    def __init__(self, level: Level, memory: SharedMemory, narrow: bool) -> None:
        self._level, self._memory, self._narrow = level, memory, narrow
        self.rooms: list[Tensor] = []

    def begin(self, job: Job) -> None:
        """Signal that the other ranks of the node can read this rank's gradients of the bucket."""
        job.pending = [self._memory.signal()]

    def end(self, job: Job) -> None:
        """Add up the own part, which no other rank reads."""
        block = job.buffers.block
        divisor = divisor_of(self._level, job, self._narrow)
        self._memory.add_up(block, self._level.own(job.bucket), divisor)


class Share:
    """Brings a rank's averaged piece to its peers, and theirs to it.

    Args:
        groups: The process groups.
        wire: The dtype in which gradients leave a node; None for their own.
    """

    def __init__(self, groups: Groups, wire: torch.dtype | None) -> None:
        self._groups, self._wire = groups, wire
        self._rooms = Rooms(lambda bucket: sum(part.numel for part in self._parts(bucket)))

    @property
    def rooms(self) -> list[Tensor]:
        """See `Stage`."""
        return self._rooms.kept

    def begin(self, job: Job) -> None:
        """Begin to gather the pieces of the shard."""
        groups, grads = self._groups, job.buffers.grads
        parts = self._parts(job.bucket)
        if self._wire is None or self._wire == grads.dtype or groups.peers.size() == 1:
            job.pending = collectives.collect(grads, parts, groups.peers, groups.on_host)
            return
        slots = _slots(parts)
        job.room = self._rooms.take(job.buffers, self._wire)
        own = groups.replica_index
        job.room[slots[own].start : slots[own].stop].copy_(grads[parts[own].start : parts[own].stop])
        job.pending = collectives.collect(job.room, slots, groups.peers, groups.on_host)

    def end(self, job: Job) -> None:
        """Take what the peers have sent in another dtype."""
        if job.room is None:
            return
        parts = self._parts(job.bucket)
        for part, slot in zip(parts, _slots(parts), strict=True):
            job.buffers.grads[part.start : part.stop].copy_(job.room[slot.start : slot.stop])
        self._rooms.give_back(job.room)
        job.room = None

    def _parts(self, bucket: Bucket) -> list[Range]:
        return [bucket.pieces[place] for place in self._groups.grid.places_of(self._groups.shard)]


def divisor_of(level: Level, job: Job, narrow: bool) -> float:
    """Return what a level's sums of the gradients of a bucket are divided by."""
    is_narrow = narrow or job.buffers.grads.dtype.itemsize == 2
    divisor = level.narrow_divisor if is_narrow else level.divisor
    return job.without_absent(divisor) if level.is_last else divisor


def stages_of(groups: Groups, memory: SharedMemory | None, reduce_dtype: torch.dtype | None = None) -> list[Stage]:
    """Return the stages of a reduction, in order.

    Args:
        groups: The process groups.
        memory: The shared memory of the node, if its ranks can read each other's memory.
        reduce_dtype: The dtype in which gradients leave a node; None for their own.
    """
    wire = reduce_dtype if groups.grid.nodes > 1 else None
    narrow = wire is not None and wire.itemsize == 2
    stages: list[Stage] = []
    for level in levels_of(groups, wire):
        if memory is not None and level.group is groups.node:
            stages.append(SharedSum(level, memory, narrow))
        else:
            stages.append(Exchange(level, narrow, groups.on_host))
    return [*stages, Share(groups, wire)]


def _slots(parts: Sequence[Range]) -> list[Range]:
    """Return adjacent ranges from 0 on, as long as ``parts``."""
    ends = list(accumulate((part.numel for part in parts), initial=0))
    return [Range(start, stop) for start, stop in pairwise(ends)]
