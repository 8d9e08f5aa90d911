"""The combinatorics against every subset, one by one, of small worlds."""

from itertools import combinations
from math import comb

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lightning_replica import ConfigurationError
from lightning_replica.cli.losses import Holders, by_node, by_rank
from lightning_replica.core.grid import Grid


@st.composite
def worlds(draw: st.DrawFn) -> tuple[int, int, int]:
    replicas, shards = draw(st.integers(1, 5)), draw(st.integers(1, 6))
    ranks = replicas * shards
    return ranks, replicas, draw(st.sampled_from([d for d in range(1, ranks + 1) if ranks % d == 0]))


def lost(ranks: int, replicas: int, gone: set[int]) -> bool:
    """By the grid's own word."""
    if ranks == 1:
        return gone == {0}
    grid = Grid.of(ranks, replicas)
    return any(gone.issuperset(grid.peers(rank)) for rank in range(grid.shards))


@given(worlds())
def test_losses_of_ranks(world: tuple[int, int, int]) -> None:
    ranks, replicas, _ = world
    if ranks > 12:
        return
    holders = by_rank(ranks, replicas)
    assert holders.even
    assert holders.tolerance == replicas - 1
    for k in range(ranks + 1):
        expected = sum(lost(ranks, replicas, set(gone)) for gone in combinations(range(ranks), k))
        assert holders.fatal(k) == expected
        assert holders.probability(k) * comb(ranks, k) == expected


@given(worlds())
def test_losses_of_nodes(world: tuple[int, int, int]) -> None:
    ranks, replicas, per_node = world
    nodes = ranks // per_node
    if nodes > 10:
        return
    holders = by_node(ranks, replicas, per_node)
    countable = holders.countable(nodes)
    assert list(countable)[0] == holders.tolerance + 1
    for k in [*range(holders.tolerance + 1), *countable]:
        expected = 0
        for gone in combinations(range(nodes), k):
            dead = {rank for node in gone for rank in range(node * per_node, (node + 1) * per_node)}
            expected += lost(ranks, replicas, dead)
        assert holders.fatal(k) == expected, (k, holders)
    if holders.even:
        assert countable[-1] == nodes


def test_half_split_placement() -> None:
    """2 of 128 nodes lose a shard with 0.8 %; on one node, any loss does."""
    assert float(by_node(1024, 2, 8).probability(2)) == pytest.approx(0.0079, abs=5e-5)
    assert by_node(8, 2, 8).tolerance == 0


def test_a_replica_that_is_no_whole_number_of_nodes() -> None:
    holders = by_node(24, 2, 8)
    assert not holders.even
    assert holders.fatal(2) == comb(3, 2)
    assert list(holders.countable(5)) == [2]
    with pytest.raises(ValueError, match="counted for 2 losses only"):
        holders.fatal(3)


def test_large_worlds_are_exact() -> None:
    holders = by_rank(100_000, 2)
    assert holders.fatal(2) == 50_000
    assert holders.fatal(3) == 50_000 * 99_998
    assert by_rank(1, 1) == Holders(1, frozenset({frozenset({0})}))


def test_nodes_that_do_not_come_out_even() -> None:
    with pytest.raises(ConfigurationError, match=r"ranks_per_node=3 does not divide ranks=8"):
        by_node(8, 2, 3)
    with pytest.raises(ConfigurationError, match="ranks_per_node=0"):
        by_node(8, 2, 0)
