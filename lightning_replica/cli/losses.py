"""How many simultaneous losses a job survives: exact combinatorics. Pure.

A shard is lost when everything that holds it is lost, be it ranks or whole nodes. So each shard has a set of holders,
and a set of losses is fatal if it contains one of them.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from fractions import Fraction
from math import comb

from lightning_replica.errors import ConfigurationError


@dataclass(frozen=True)
class Holders:
    """Who holds the shards.

    Attributes:
        total: Number of ranks, or of nodes.
        groups: For every shard its holders, numbered from 0; equal sets are kept once.
    """

    total: int
    groups: frozenset[frozenset[int]]

    @property
    def tolerance(self) -> int:
        """Losses that are survived, whichever they are."""
        return min(map(len, self.groups)) - 1

    @property
    def even(self) -> bool:
        """Whether the groups are of one size and share no member."""
        sizes = {len(group) for group in self.groups}
        return len(sizes) == 1 and len(frozenset().union(*self.groups)) == sizes.pop() * len(self.groups)

    def fatal(self, losses: int) -> int:
        """The number of sets of ``losses`` members that lose a shard.

        Raises:
            ValueError: If more than the smallest group is lost and the groups are not even: that is not counted.
        """
        if losses <= self.tolerance:
            return 0
        if losses == self.tolerance + 1:
            return sum(len(group) == losses for group in self.groups)
        if not self.even:
            raise ValueError(f"{losses=}: groups that overlap are counted for {self.tolerance + 1} losses only.")
        # Inclusion and exclusion over the groups that are lost completely.
        held_by = self.tolerance + 1
        return sum(
            (-1) ** (lost + 1)
            * comb(len(self.groups), lost)
            * comb(self.total - lost * held_by, losses - lost * held_by)
            for lost in range(1, losses // held_by + 1)
            if lost <= len(self.groups)
        )

    def probability(self, losses: int) -> Fraction:
        """The chance that ``losses`` members, any as likely as the others, lose a shard."""
        return Fraction(self.fatal(losses), comb(self.total, losses))

    def countable(self, rows: int) -> range:
        """The first ``rows`` numbers of losses that can be fatal and that `fatal` counts."""
        first = self.tolerance + 1
        return range(first, min(first + (rows if self.even else 1), self.total + 1))


def by_rank(ranks: int, replicas: int) -> Holders:
    """Ranks as the grid places them: the holders of shard s are the ranks s, s + S, s + 2S ..."""
    shards = ranks // replicas
    return Holders(ranks, frozenset(frozenset(range(shard, ranks, shards)) for shard in range(shards)))


def by_node(ranks: int, replicas: int, ranks_per_node: int) -> Holders:
    """Whole nodes, their ranks numbered one node after the other.

    Raises:
        ConfigurationError: If the nodes do not come out even.
    """
    if ranks_per_node < 1 or ranks % ranks_per_node:
        raise ConfigurationError(
            f"ranks_per_node={ranks_per_node} does not divide ranks={ranks}: nodes must hold the same number of ranks."
        )
    groups = by_rank(ranks, replicas).groups
    return Holders(ranks // ranks_per_node, frozenset(_nodes(group, ranks_per_node) for group in groups))


def _nodes(ranks: Iterable[int], ranks_per_node: int) -> frozenset[int]:
    return frozenset(rank // ranks_per_node for rank in ranks)
