"""Exact combinatorics of how many simultaneous losses a job survives. Pure functions.

A shard is lost when all its holders are lost, be they ranks or whole nodes. So each shard has a set of holders, and a
set of losses is fatal if it contains one of these sets.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from fractions import Fraction
from math import comb

from lightning_replica.errors import ConfigurationError


@dataclass(frozen=True)
class Holders:
    """The holders of all shards.

    Attributes:
        total: Number of ranks, or of nodes.
        groups: For every shard the set of its holders, numbered from 0. Equal sets are kept once.
    """

    total: int
    groups: frozenset[frozenset[int]]

    @property
    def tolerance(self) -> int:
        """The number of losses that the job always survives."""
        return min(map(len, self.groups)) - 1

    @property
    def even(self) -> bool:
        """Whether all groups have the same size and no two share a member."""
        sizes = {len(group) for group in self.groups}
        return len(sizes) == 1 and len(frozenset().union(*self.groups)) == sizes.pop() * len(self.groups)

    def fatal(self, losses: int) -> int:
        """Return how many sets of ``losses`` lost members contain all holders of some shard.

        Raises:
            ValueError: If ``losses`` is larger than the smallest group and the groups are not even. Such sets are not
                counted.
        """
        if losses <= self.tolerance:
            return 0
        if losses == self.tolerance + 1:
            return sum(len(group) == losses for group in self.groups)
        if not self.even:
            raise ValueError(f"{losses=}: groups that overlap are counted for {self.tolerance + 1} losses only.")
        # Inclusion-exclusion over the groups that are lost completely.
        held_by = self.tolerance + 1
        return sum(
            (-1) ** (lost + 1)
            * comb(len(self.groups), lost)
            * comb(self.total - lost * held_by, losses - lost * held_by)
            for lost in range(1, losses // held_by + 1)
            if lost <= len(self.groups)
        )

    def probability(self, losses: int) -> Fraction:
        """Return the probability that ``losses`` members, all equally likely, lose a shard."""
        return Fraction(self.fatal(losses), comb(self.total, losses))

    def countable(self, rows: int) -> range:
        """Return the first ``rows`` numbers of losses that can be fatal and that `fatal` can count."""
        first = self.tolerance + 1
        return range(first, min(first + (rows if self.even else 1), self.total + 1))


def by_rank(ranks: int, replicas: int, stages: int = 1) -> Holders:
    """Return the ranks that hold each shard: in each pipeline stage, the ranks s, s + S, s + 2S ..., counted in it.

    Tensor and expert parallelism change nothing: they divide the ranks that lie between two holders.
    """
    in_stage = ranks // stages
    stride = in_stage // replicas
    groups = (
        frozenset(range(first + shard, first + in_stage, stride))
        for first in range(0, ranks, in_stage)
        for shard in range(stride)
    )
    return Holders(ranks, frozenset(groups))


def by_node(ranks: int, replicas: int, ranks_per_node: int, stages: int = 1) -> Holders:
    """Return the nodes that hold each shard, if ranks are numbered one node after the other.

    Raises:
        ConfigurationError: If ``ranks_per_node`` does not divide ``ranks``.
    """
    if ranks_per_node < 1 or ranks % ranks_per_node:
        raise ConfigurationError(
            f"ranks_per_node={ranks_per_node} does not divide ranks={ranks}: nodes must hold the same number of ranks."
        )
    groups = by_rank(ranks, replicas, stages).groups
    return Holders(ranks // ranks_per_node, frozenset(_nodes(group, ranks_per_node) for group in groups))


def _nodes(ranks: Iterable[int], ranks_per_node: int) -> frozenset[int]:
    return frozenset(rank // ranks_per_node for rank in ranks)
