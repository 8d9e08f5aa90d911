"""Where every element of every parameter lies, and which rank owns it. Pure functions of integers.

[Note: pieces]
Parameters are laid one after the other into a flat *world* buffer, last registered first (the order in which
backward finishes their gradients), and the buffer is cut into buckets. A bucket is padded so that it divides into N
aligned *pieces*, one per rank. Only the rank of a piece has its sum, so the order of summation depends on neither R nor
S, and the peers of a shard have the same bits by construction.
A shard consists of the pieces of its R peers. Its *local* buffer holds them bucket by bucket, in order of replica:

    bucket 0 of the world buffer, N=4, R=2, S=2         local buffer of shard 0        of shard 1
    | piece 0 | piece 1 | piece 2 | piece 3 |           | piece 0 | piece 2 | ...      | piece 1 | piece 3 | ...
       shard 0   shard 1   shard 0   shard 1
       replica 0           replica 1

On one node the pieces lie in the order of ranks. On several nodes they lie in *blocks*, one for each position on a
node: block l has the pieces of the ranks that are number l on their nodes, in order of node.

    M=2 nodes of L=2 ranks: ranks 0, 1 on node 0, and 2, 3 on node 1

    | piece 0 | piece 2 | piece 1 | piece 3 |
        block 0             block 1

So what ranks send each other is contiguous on both levels (see [Note: two levels] in levels.py). The order depends on N
and M only. For one replica index the pieces that are gathered together are adjacent, too.

[Note: partitions]
"element" cuts the flat buffer into equal buckets, and a bucket into N equal pieces, wherever the cuts fall. So a large
parameter takes no more memory for what is under way than small ones do, and can be sent before all of it is reduced.
"parameter" gives every parameter whole to one rank, balanced by size over all buckets. Within a bucket, parameters then
lie in order of their owners, and a piece has as many elements as its parameters need, possibly none.

[Note: alignment]
A parameter begins at a multiple of 64 bytes, as in memory of its own. Matrix products of BLAS libraries sum in another
order where their operands are not aligned. So with a packed buffer, some steps with some shapes would end an ulp off
DDP (tests/state/data/test_as_ddp.py). On GPUs, the fastest kernels do not take unaligned weights.
"""

import heapq
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise, starmap
from typing import Literal, TypeAlias

from lightning_replica.core.grid import Grid
from lightning_replica.errors import ConfigurationError

Partition: TypeAlias = Literal["element", "parameter"]


@dataclass(frozen=True)
class Range:
    """The elements from ``start`` up to, but not including, ``stop`` of a flat buffer."""

    start: int
    stop: int

    @property
    def numel(self) -> int:
        """Number of elements."""
        return self.stop - self.start

    def shift(self, offset: int) -> "Range":
        """Return the same range, ``offset`` elements further on."""
        return Range(self.start + offset, self.stop + offset)

    def overlap(self, other: "Range") -> "Range":
        """Return the elements in both ranges; an empty range (``numel == 0``) if there are none."""
        start = max(self.start, other.start)
        return Range(start, max(start, min(self.stop, other.stop)))


@dataclass(frozen=True)
class Bucket:
    """A run of parameters that are reduced and gathered together.

    Attributes:
        index: Position among the buckets of its layout.
        pieces: World range of each rank's piece, in order of rank, padding included; together they are the bucket.
        locals: Range of each rank's piece in the local buffer of its shard.
        blocks: World range of each block, in order of the position on a node.
        parameters: Indices of the parameters inside, some perhaps in part, in order of their world range.
    """

    index: int
    pieces: tuple[Range, ...]
    locals: tuple[Range, ...]
    blocks: tuple[Range, ...]
    parameters: tuple[int, ...]

    @property
    def world(self) -> Range:
        """Range in the world buffer, padding included."""
        return Range(self.blocks[0].start, self.blocks[-1].stop)


@dataclass(frozen=True)
class ParameterPiece:
    """The part of a parameter that lies in one piece: the same elements in three buffers.

    Attributes:
        parameter: Index of the parameter, in registration order.
        world: Range in the world buffer.
        local: Range in the shard's local buffer.
        param: Range in the flattened parameter itself.
        rank: The rank whose piece it lies in. Over all ranks, every element of every parameter lies in one piece.
    """

    parameter: int
    world: Range
    local: Range
    param: Range
    rank: int


@dataclass(frozen=True)
class Layout:
    """The plan of the flat buffers.

    Attributes:
        grid: The table of ranks.
        world: World range of every parameter, in registration order.
        buckets: The buckets in launch order; they tile the world buffer.
        world_numel: Elements of the world buffer, padding included.
        local_numels: Elements of each shard's local buffer.
    """

    grid: Grid
    world: tuple[Range, ...]
    buckets: tuple[Bucket, ...]
    world_numel: int
    local_numels: tuple[int, ...]

    def pieces(self, shard: int) -> tuple[ParameterPiece, ...]:
        """Return every part of every parameter that ``shard`` owns, in order of the local buffer, without padding."""
        found = []
        for bucket in self.buckets:
            for place in self.grid.places_of(shard):
                piece, local = bucket.pieces[place], bucket.locals[place]
                for index in bucket.parameters:
                    world = self.world[index].overlap(piece)
                    if world.numel:
                        to_local = world.shift(local.start - piece.start)
                        to_param = world.shift(-self.world[index].start)
                        found.append(ParameterPiece(index, world, to_local, to_param, self.grid.ranks[place]))
        return tuple(found)


def plan_layout(
    grid: Grid, numels: Sequence[int], bucket_numel: int, partition: Partition = "element", align: int = 16
) -> Layout:
    """Lay out parameters of ``numels`` elements, given in registration order.

    Args:
        grid: The table of ranks.
        numels: Elements of each parameter, in registration order; zero is allowed.
        bucket_numel: Elements of a bucket. Where parameters stay whole, a bucket closes once it holds as many or more.
        partition: See [Note: partitions].
        align: Every piece and every parameter starts at a multiple of this many elements. See [Note: alignment].

    Raises:
        ConfigurationError: If there is nothing to lay out, or a size is not positive.
    """
    if not numels:
        raise ConfigurationError(
            "There is no parameter to train: the optimizer holds none with requires_grad=True."
            " Check `configure_optimizers` and what was frozen."
        )
    if bucket_numel < 1 or align < 1:
        raise ConfigurationError(f"{bucket_numel=} and {align=} must be at least 1.")
    order = [place for local in range(grid.local_size) for place in range(local, grid.size, grid.local_size)]
    world: dict[int, Range] = {}
    if partition == "element":
        filled = _fill_evenly(numels, bucket_numel, align, grid.size, world)
    else:
        filled = _fill_with_whole(numels, bucket_numel, align, order, world)
    buckets: list[Bucket] = []
    local_ends = [0] * grid.shards
    start = 0
    for sizes, members in filled:
        pieces = dict(zip(order, _cut(start, [sizes[place] for place in order]), strict=True))
        blocks = _cut(start, [sum(sizes[local :: grid.local_size]) for local in range(grid.local_size)])
        locals_ = []
        for place, size in enumerate(sizes):
            shard = grid.shard_at(place)
            locals_.append(Range(local_ends[shard], local_ends[shard] + size))
            local_ends[shard] += size
        by_place = tuple(pieces[place] for place in range(grid.size))
        buckets.append(Bucket(len(buckets), by_place, tuple(locals_), blocks, tuple(members)))
        start = buckets[-1].world.stop
    return Layout(grid, tuple(world[i] for i in range(len(numels))), tuple(buckets), start, tuple(local_ends))


def balance(numels: Sequence[int], ranks: int) -> tuple[int, ...]:
    """Assign every parameter to a rank: the largest first, each to the rank that has least.

    The fullest rank has at most 4/3 of what the best possible assignment gives it (Graham 1969, longest processing
    time first), or one parameter that is larger than that.

    Returns:
        The rank that owns each parameter.
    """
    owners = [0] * len(numels)
    loads = [(0, rank) for rank in range(ranks)]
    for index in sorted(range(len(numels)), key=lambda index: (-numels[index], index)):
        load, rank = heapq.heappop(loads)
        owners[index] = rank
        heapq.heappush(loads, (load + numels[index], rank))
    return tuple(owners)


_Filled: TypeAlias = tuple[list[int], list[int]]
"""A bucket: the size of each place's piece, and the parameters inside."""


def _fill_evenly(
    numels: Sequence[int], bucket_numel: int, align: int, ranks: int, world: dict[int, Range]
) -> list[_Filled]:
    """Lay all parameters one after the other, last registered first, and cut them into equal buckets."""
    indices = list(reversed(range(len(numels))))
    total = _lay(indices, numels, 0, align, world)
    piece = _round_up(-(-total // (ranks * max(1, -(-total // bucket_numel)))), align) or align
    filled: list[_Filled] = [([piece] * ranks, []) for _ in range(max(1, -(-total // (piece * ranks))))]
    for index in indices:
        first = min(world[index].start // (piece * ranks), len(filled) - 1)
        last = max(first, (world[index].stop - 1) // (piece * ranks))
        for _, members in filled[first : last + 1]:
            members.append(index)
    return filled


def _fill_with_whole(
    numels: Sequence[int], bucket_numel: int, align: int, order: Sequence[int], world: dict[int, Range]
) -> list[_Filled]:
    """Fill each bucket with parameters, last registered first, and sort them by the place that owns them."""
    owners, position = balance(numels, len(order)), {place: number for number, place in enumerate(order)}
    filled: list[_Filled] = []
    start = 0
    for members in _close_at(numels, bucket_numel):
        sizes = [0] * len(order)
        for index in members:
            sizes[owners[index]] += _round_up(numels[index], align)
        sizes = sizes if any(sizes) else [align, *sizes[1:]]
        members.sort(key=lambda index: position[owners[index]])
        _lay(members, numels, start, align, world)
        filled.append((sizes, members))
        start += sum(sizes)
    return filled


def _close_at(numels: Sequence[int], bucket_numel: int) -> list[list[int]]:
    """Return the parameters of each bucket: last registered first, closed at ``bucket_numel`` elements."""
    filled: list[list[int]] = [[]]
    size = 0
    for index in reversed(range(len(numels))):
        if size >= bucket_numel:
            filled.append([])
            size = 0
        filled[-1].append(index)
        size += numels[index]
    return filled


def _cut(start: int, sizes: Sequence[int]) -> tuple[Range, ...]:
    """Return adjacent ranges of these sizes, the first of which begins at ``start``."""
    return tuple(starmap(Range, pairwise(accumulate(sizes, initial=start))))


def _lay(members: Sequence[int], numels: Sequence[int], start: int, align: int, world: dict[int, Range]) -> int:
    """Lay ``members`` one after the other from ``start``; return how many elements they take, padding included."""
    end = start
    for index in members:
        world[index] = Range(end, end + numels[index])
        end += _round_up(numels[index], align)
    return end - start


def _round_up(numel: int, align: int) -> int:
    return align * -(-numel // align)
