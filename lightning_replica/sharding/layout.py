"""Where every element of every parameter lies, and who owns it. Pure: integers in, integers out.

[Note: pieces]
Parameters are laid one after the other into a flat *world* buffer, last registered first (the order in which
backward finishes their gradients), and the buffer is cut into buckets. A bucket is padded so that it falls into N
equal, aligned *pieces*, one a rank, in the order of ranks. A piece is summed by its rank alone, so the order of
summation depends on neither R nor S, and the peers of a shard have the same bits by construction, not by luck.
A shard is the pieces of its R peers. Its *local* buffer holds them bucket by bucket, in order of replica:

    bucket 0 of the world buffer, N=4, R=2, S=2         local buffer of shard 0        of shard 1
    | piece 0 | piece 1 | piece 2 | piece 3 |           | piece 0 | piece 2 | ...      | piece 1 | piece 3 | ...
       shard 0   shard 1   shard 0   shard 1
       replica 0           replica 1

For one replica index the S pieces of all shards are neighbours, so a gather is R all-gathers over contiguous
memory, and a reduce-scatter over all N ranks needs no copy either.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from lightning_replica.errors import ConfigurationError
from lightning_replica.grid import Grid


@dataclass(frozen=True)
class Range:
    """Elements ``start`` up to, not including, ``stop`` of a flat buffer."""

    start: int
    stop: int

    @property
    def numel(self) -> int:
        """Number of elements."""
        return self.stop - self.start

    def shift(self, offset: int) -> "Range":
        """The same range, ``offset`` elements further on."""
        return Range(self.start + offset, self.stop + offset)

    def overlap(self, other: "Range") -> "Range":
        """The elements in both; empty (``numel == 0``) if there are none."""
        start = max(self.start, other.start)
        return Range(start, max(start, min(self.stop, other.stop)))


@dataclass(frozen=True)
class Bucket:
    """A run of parameters that is reduced and gathered as one.

    Attributes:
        index: Position in launch order.
        world: Range in the world buffer, padding included.
        local_start: Where the bucket's pieces begin in every shard's local buffer.
        piece_numel: Elements of one piece, ``world.numel / N``.
        parameters: Indices of the parameters inside, in order of their world range.
    """

    index: int
    world: Range
    local_start: int
    piece_numel: int
    parameters: tuple[int, ...]

    def piece(self, rank: int) -> Range:
        """World range of the piece that ``rank`` sums."""
        start = self.world.start + rank * self.piece_numel
        return Range(start, start + self.piece_numel)

    def local(self, replica: int) -> Range:
        """Local range of the piece of the peer in ``replica``."""
        start = self.local_start + replica * self.piece_numel
        return Range(start, start + self.piece_numel)


@dataclass(frozen=True)
class ParameterPiece:
    """The part of a parameter that lies in one piece: the same elements in three buffers.

    Attributes:
        parameter: Index of the parameter, in registration order.
        world: Range in the world buffer.
        local: Range in the shard's local buffer.
        param: Range in the flattened parameter itself.
    """

    parameter: int
    world: Range
    local: Range
    param: Range


@dataclass(frozen=True)
class Layout:
    """The plan of the flat buffers.

    Attributes:
        grid: The table of ranks.
        world: World range of every parameter, in registration order.
        buckets: In launch order; they tile the world buffer.
        world_numel: Elements of the world buffer, padding included.
        local_numel: Elements of a shard's local buffer, ``world_numel / S``.
    """

    grid: Grid
    world: tuple[Range, ...]
    buckets: tuple[Bucket, ...]
    world_numel: int
    local_numel: int

    def pieces(self, shard: int) -> tuple[ParameterPiece, ...]:
        """Every part of every parameter that ``shard`` owns, in order of the local buffer. No padding."""
        found = []
        for bucket in self.buckets:
            for replica in range(self.grid.replicas):
                piece = bucket.piece(replica * self.grid.shards + shard)
                local = bucket.local(replica)
                for index in bucket.parameters:
                    world = self.world[index].overlap(piece)
                    if world.numel:
                        to_local = world.shift(local.start - piece.start)
                        found.append(ParameterPiece(index, world, to_local, world.shift(-self.world[index].start)))
        return tuple(found)


def plan_layout(grid: Grid, numels: Sequence[int], bucket_numel: int, align: int = 16) -> Layout:
    """Lays out parameters of ``numels`` elements, given in registration order.

    A parameter is never cut by a bucket's end: a bucket closes once it holds ``bucket_numel`` elements or more.

    Args:
        grid: The table of ranks.
        numels: Elements of each parameter, in registration order; zero is allowed.
        bucket_numel: Elements after which a bucket closes.
        align: Every piece starts at a multiple of this many elements.

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
    world: dict[int, Range] = {}
    buckets: list[Bucket] = []
    end = start = local_start = 0
    members: list[int] = []
    quantum = grid.world_size * align
    for index in reversed(range(len(numels))):
        world[index] = Range(end, end + numels[index])
        end += numels[index]
        members.append(index)
        if end - start >= bucket_numel or index == 0:
            end = start + quantum * max(1, -(-(end - start) // quantum))
            piece_numel = (end - start) // grid.world_size
            buckets.append(Bucket(len(buckets), Range(start, end), local_start, piece_numel, tuple(members)))
            local_start += piece_numel * grid.replicas
            start, members = end, []
    return Layout(grid, tuple(world[i] for i in range(len(numels))), tuple(buckets), end, local_start)
