"""The R x S table of ranks."""

from collections.abc import Sequence
from dataclasses import dataclass

from lightning_replica.errors import ConfigurationError


@dataclass(frozen=True)
class Grid:
    """The table that says which rank holds which shard: ``rank = replica * shards + shard``.

    Replicas are contiguous runs of ranks, so the peers of a shard are ``shards`` ranks apart. If ranks are numbered
    node by node, peers stand on different nodes as soon as a replica fills a node (half-split placement, see
    docs/life_of_a_step.md).

    Attributes:
        world_size: Number of ranks, N.
        replicas: Complete copies of the optimizer state, R. Divides N.

    Raises:
        ConfigurationError: If R does not divide N.
    """

    world_size: int
    replicas: int

    def __post_init__(self) -> None:
        if self.replicas < 1 or self.world_size % self.replicas:
            choices = ", ".join(str(r) for r in range(1, self.world_size + 1) if self.world_size % r == 0)
            raise ConfigurationError(
                f"replicas={self.replicas} does not divide world_size={self.world_size}: every shard must be held by"
                f" the same number of ranks. Choose one of {choices}."
            )

    @property
    def shards(self) -> int:
        """Number of shards, S = N / R."""
        return self.world_size // self.replicas

    def shard_of(self, rank: int) -> int:
        """Return the shard that ``rank`` owns."""
        return rank % self.shards

    def replica_of(self, rank: int) -> int:
        """Return the replica that ``rank`` belongs to."""
        return rank // self.shards

    def peers(self, rank: int) -> tuple[int, ...]:
        """Return the R ranks that own the shard of ``rank``, itself included, in order of replica."""
        return tuple(range(self.shard_of(rank), self.world_size, self.shards))

    def together(self, nodes: Sequence[str]) -> tuple[int, ...]:
        """Return the shards of which two holders stand on one node although there are several nodes.

        Args:
            nodes: Name of every rank's node, in order of rank.
        """
        if len(set(nodes)) == 1:
            return ()
        held = {shard: [nodes[rank] for rank in self.peers(shard)] for shard in range(self.shards)}
        return tuple(shard for shard, places in held.items() if len(set(places)) < len(places))

    def replica_ranks(self, rank: int) -> tuple[int, ...]:
        """Return the S ranks of the replica of ``rank``, itself included, in order of shard."""
        first = self.replica_of(rank) * self.shards
        return tuple(range(first, first + self.shards))
