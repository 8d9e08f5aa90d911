"""The R x S table of a parallel group's ranks."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Protocol

from lightning_replica.errors import ConfigurationError


class Table(Protocol):
    """Which rank owns which shard, as planner and dying gasp need it: one `Grid`, or several (`grids.Grids`)."""

    @property
    def size(self) -> int:
        """Number of ranks."""

    @property
    def shards(self) -> int:
        """Number of shards."""

    @property
    def replicas(self) -> int:
        """Number of holders of each shard, R."""

    def shard_of(self, rank: int) -> int:
        """Return the shard that ``rank`` owns."""

    def shard_name(self, shard: int) -> str:
        """Return what ``shard`` is called in messages."""

    def peers(self, rank: int) -> tuple[int, ...]:
        """Return the R ranks that own the shard of ``rank``, itself included, in order of replica."""


@dataclass(frozen=True)
class Grid:
    """The table of the ranks among which a model is sharded: which rank holds which shard.

    The ranks have places 0 to N - 1, and ``place = replica * shards + shard``. Replicas are contiguous runs of places,
    so the peers of a shard are ``shards`` places apart. If ranks are numbered node by node, peers stand on different
    nodes as soon as a replica fills a node (half-split placement, see docs/life_of_a_step.md).

    The places fill ``nodes`` nodes, one after the other, with the same number of ranks on each. These are the nodes of
    the plan. A rank keeps its node in the grid wherever its process runs, because the order of summation depends on it
    (see [Note: two levels] in sharding/levels.py).

    A grid is one parallel group's. In a world of several groups each has its own, under one commit
    (tests/sharding/test_grids.py). `Grid.of` makes the grid of a world that is one group.

    Attributes:
        ranks: The ranks, by place.
        replicas: Complete copies of the optimizer state, R. Divides N.
        nodes: Number of nodes, M. Divides N.
        averaged_over: Number of ranks whose data are in a sum of N gradients; None for N. An expert gets tokens from
            ranks that do not have it.

    Raises:
        ConfigurationError: If R or M does not divide N.
    """

    ranks: tuple[int, ...]
    replicas: int
    nodes: int = 1
    averaged_over: int | None = None

    def __post_init__(self) -> None:
        if self.replicas < 1 or self.size % self.replicas:
            choices = ", ".join(str(r) for r in range(1, self.size + 1) if self.size % r == 0)
            raise ConfigurationError(
                f"replicas={self.replicas} does not divide world_size={self.size}: every shard must be held by"
                f" the same number of ranks. Choose one of {choices}."
            )
        if self.nodes < 1 or self.size % self.nodes:
            raise ConfigurationError(
                f"nodes={self.nodes} does not divide world_size={self.size}: every node must have the same number of"
                " ranks."
            )

    @classmethod
    def of(cls, world_size: int, replicas: int, nodes: int = 1) -> "Grid":
        """Return the grid of all ranks of a world."""
        return cls(tuple(range(world_size)), replicas, nodes)

    def __str__(self) -> str:
        return f"{self.size} ranks and replicas={self.replicas}"

    @property
    def size(self) -> int:
        """Number of ranks, N."""
        return len(self.ranks)

    @property
    def divisor(self) -> int:
        """What the sum of all ranks' gradients is divided by."""
        return self.size if self.averaged_over is None else self.averaged_over

    @property
    def shards(self) -> int:
        """Number of shards, S = N / R."""
        return self.size // self.replicas

    @property
    def local_size(self) -> int:
        """Number of ranks on each node, L = N / M."""
        return self.size // self.nodes

    @property
    def replicas_fill_nodes(self) -> bool:
        """Whether every replica consists of whole nodes. Then all peers of a rank stand on different nodes."""
        return self.nodes % self.replicas == 0

    @property
    def replicas_span_nodes(self) -> bool:
        """Whether every replica consists of several whole nodes."""
        return self.replicas_fill_nodes and self.nodes > self.replicas

    def place_of(self, rank: int) -> int:
        """Return the place of ``rank``."""
        return self._places[rank]

    @cached_property
    def _places(self) -> dict[int, int]:
        return {rank: place for place, rank in enumerate(self.ranks)}

    def shard_of(self, rank: int) -> int:
        """Return the shard that ``rank`` owns."""
        return self.shard_at(self.place_of(rank))

    def shard_name(self, shard: int) -> str:
        """Return what ``shard`` is called in messages."""
        return str(shard)

    def shard_at(self, place: int) -> int:
        """Return the shard that the rank at ``place`` owns."""
        return place % self.shards

    def replica_of(self, rank: int) -> int:
        """Return the replica that ``rank`` belongs to."""
        return self.place_of(rank) // self.shards

    def places_of(self, shard: int) -> range:
        """Return the R places whose ranks own ``shard``, in order of replica."""
        return range(shard, self.size, self.shards)

    def peers(self, rank: int) -> tuple[int, ...]:
        """Return the R ranks that own the shard of ``rank``, itself included, in order of replica."""
        return tuple(self.ranks[place] for place in self.places_of(self.shard_of(rank)))

    def replica_ranks(self, rank: int) -> tuple[int, ...]:
        """Return the S ranks of the replica of ``rank``, itself included, in order of shard."""
        return tuple(self.ranks[place] for place in self.replica_places(rank))

    def replica_places(self, rank: int) -> range:
        """Return the S places of the replica of ``rank``, in order of shard."""
        first = self.replica_of(rank) * self.shards
        return range(first, first + self.shards)

    def local_of(self, rank: int) -> int:
        """Return the position of ``rank`` among the ranks of its node."""
        return self.place_of(rank) % self.local_size

    def node_of(self, rank: int) -> int:
        """Return the node of ``rank``."""
        return self.place_of(rank) // self.local_size

    def node_ranks(self, rank: int) -> tuple[int, ...]:
        """Return the L ranks of the node of ``rank``, itself included."""
        first = self.node_of(rank) * self.local_size
        return self.ranks[first : first + self.local_size]

    def counterparts(self, rank: int) -> tuple[int, ...]:
        """Return the M ranks that have the same position on their nodes as ``rank``, itself included, by node."""
        return self.ranks[self.local_of(rank) :: self.local_size]

    def co_located(self, nodes: Sequence[str]) -> tuple[int, ...]:
        """Return the shards of which two holders stand on one node although there are several nodes.

        Args:
            nodes: Name of every rank's node, in order of rank.
        """
        if len(set(nodes)) == 1:
            return ()
        held = {shard: [nodes[self.ranks[place]] for place in self.places_of(shard)] for shard in range(self.shards)}
        return tuple(shard for shard, places in held.items() if len(set(places)) < len(places))


def grids_of_every(
    stride: int, ranks: range, replicas: int, per_node: int, averaged_over: int | None = None
) -> tuple[Grid, ...]:
    """Return ``stride`` grids of ``ranks``, each of every ``stride``-th of them.

    Args:
        stride: How far apart the ranks of a grid are.
        ranks: The ranks.
        replicas: Complete copies of the optimizer state, R.
        per_node: Number of ranks on each node of the plan.
        averaged_over: As in `Grid`.
    """
    found = []
    for first in range(stride):
        own = tuple(ranks[first::stride])
        found.append(
            Grid(own, replicas, _nodes_of(own, per_node), None if averaged_over == len(own) else averaged_over)
        )
    return tuple(found)


def _nodes_of(ranks: tuple[int, ...], per_node: int) -> int:
    """Return on how many nodes the ranks of a grid stand; 1 if they are not spread evenly."""
    counts: dict[int, int] = {}
    for rank in ranks:
        counts[rank // per_node] = counts.get(rank // per_node, 0) + 1
    return len(counts) if len(set(counts.values())) == 1 else 1
