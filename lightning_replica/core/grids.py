"""The grids of a world, in which model parallelism gives every coordinate its own."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

from lightning_replica.core.grid import Grid
from lightning_replica.errors import ConfigurationError


@dataclass(frozen=True)
class Grids:
    """Which rank owns which shard in the whole world: every rank is in one grid.

    Under data parallelism alone there is one grid. Under model parallelism there is one for each coordinate (tensor and
    pipeline rank): its ranks have the same part of the model. Shards are numbered through all grids, so planner and
    dying gasp need not know how many there are.

    Under expert parallelism, a rank shards its experts among other ranks than the rest: it is in a second grid. In both
    it has the same peers. So who holds its shard, and who can send it, is asked of the first.

    Attributes:
        grids: The grids. Together they have the ranks from 0 to the world's size, each once.
        names: What each grid is called in messages; empty if there is only one.
        experts: The grids of experts, or none. Together they have all ranks as well.

    Raises:
        ConfigurationError: If a rank is in no grid or in several, if R differs, or if a rank's peers in its grid of
            experts are not those in the other.
    """

    grids: tuple[Grid, ...]
    names: tuple[str, ...] = ("",)
    experts: tuple[Grid, ...] = ()

    def __post_init__(self) -> None:
        """Check the values.

        Raises:
            ConfigurationError: See the class.
        """
        ranks = sorted(rank for grid in self.grids for rank in grid.ranks)
        if ranks != list(range(len(ranks))) or len(self.names) != len(self.grids):
            raise ConfigurationError(f"grids={self.grids}: every rank must be in one grid, and every grid have a name.")
        if len({grid.replicas for grid in self.grids}) != 1:
            raise ConfigurationError(f"grids={self.grids}: every grid must have the same number of replicas.")
        if not self.experts:
            return
        if sorted(rank for grid in self.experts for rank in grid.ranks) != ranks:
            raise ConfigurationError(f"experts={self.experts}: every rank must be in one grid of experts.")
        if any(grid.peers(rank) != self.peers(rank) for grid in self.experts for rank in grid.ranks):
            raise ConfigurationError(
                f"experts={self.experts}: the peers of every rank must be the same as in grids={self.grids}."
            )

    @classmethod
    def of(cls, grid: Grid) -> "Grids":
        """Return the grids of a world that is one grid."""
        return cls((grid,))

    def __str__(self) -> str:
        return " and ".join(dict.fromkeys(map(str, self.grids)))

    @property
    def size(self) -> int:
        """Number of ranks in the world."""
        return sum(grid.size for grid in self.grids)

    @property
    def shards(self) -> int:
        """Number of shards of all grids."""
        return sum(grid.shards for grid in self.grids)

    @property
    def replicas(self) -> int:
        """Number of holders of each shard, R."""
        return self.grids[0].replicas

    def number_of(self, rank: int) -> int:
        """Return the number of the grid that ``rank`` is in."""
        return self._numbers[rank]

    def grid_of(self, rank: int) -> Grid:
        """Return the grid that ``rank`` is in."""
        return self.grids[self.number_of(rank)]

    def grids_of(self, rank: int) -> tuple[Grid, ...]:
        """Return the grid that ``rank`` is in, and that of its experts, if there are any."""
        return (self.grid_of(rank), *(grid for grid in self.experts if rank in grid.ranks))

    def same_part(self, rank: int) -> tuple[int, ...]:
        """Return the ranks that have the same part of the model as ``rank``, itself included."""
        first, *others = self.grids_of(rank)
        return tuple(each for each in first.ranks if all(each in other.ranks for other in others))

    def shard_of(self, rank: int) -> int:
        """Return the number of the shard of ``rank``, counted through all grids."""
        number = self.number_of(rank)
        return sum(grid.shards for grid in self.grids[:number]) + self.grids[number].shard_of(rank)

    def shard_name(self, shard: int) -> str:
        """Return what ``shard`` is called in messages: its number in its grid, and the grid's name."""
        for grid, name in zip(self.grids, self.names, strict=True):
            if shard < grid.shards:
                return f"{shard} of {name}" if name else str(shard)
            shard -= grid.shards
        raise IndexError(shard)

    def peers(self, rank: int) -> tuple[int, ...]:
        """Return the R ranks that own the shard of ``rank``, itself included, in order of replica."""
        return self.grid_of(rank).peers(rank)

    def co_located(self, nodes: Sequence[str]) -> tuple[str, ...]:
        """Return the names of the shards of which two holders stand on one node although there are several nodes.

        Args:
            nodes: Name of every rank's node, in order of rank.
        """
        found, first = [], 0
        for grid in self.grids:
            found += [self.shard_name(first + shard) for shard in grid.co_located(nodes)]
            first += grid.shards
        return tuple(found)

    @cached_property
    def _numbers(self) -> dict[int, int]:
        return {rank: number for number, grid in enumerate(self.grids) for rank in grid.ranks}
