import pytest
from hypothesis import given
from hypothesis import strategies as st

from lightning_replica.core.grid import Grid
from lightning_replica.errors import ConfigurationError

grids = st.tuples(st.integers(1, 8), st.integers(1, 8))


@given(grids)
def test_peers_and_replicas_cross_in_one_rank(rs: tuple[int, int]) -> None:
    replicas, shards = rs
    grid = Grid.of(replicas * shards, replicas)
    for rank in range(grid.size):
        assert set(grid.peers(rank)) & set(grid.replica_ranks(rank)) == {rank}
        assert grid.replica_of(rank) * grid.shards + grid.shard_of(rank) == rank
        assert [grid.replica_of(peer) for peer in grid.peers(rank)] == list(range(replicas))
        assert [grid.shard_of(other) for other in grid.replica_ranks(rank)] == list(range(shards))


def test_peers_stand_half_a_world_apart() -> None:
    assert Grid.of(8, 2).peers(1) == (1, 5)


@pytest.mark.parametrize("replicas", [0, 3, 5, 8])
def test_replicas_that_do_not_divide(replicas: int) -> None:
    with pytest.raises(
        ConfigurationError, match=rf"replicas={replicas} does not divide world_size=4.*Choose one of 1, 2, 4"
    ):
        Grid.of(4, replicas)


def test_one_rank() -> None:
    grid = Grid.of(1, 1)
    assert (grid.shards, grid.peers(0), grid.replica_ranks(0)) == (1, (0,), (0,))


def test_peers_on_one_node_are_named() -> None:
    grid = Grid.of(8, 2)
    assert grid.co_located(["a"] * 4 + ["b"] * 4) == ()
    assert grid.co_located(["a"] * 8) == ()  # where there is one node only, nothing can be done about it
    assert grid.co_located(["a"] * 6 + ["b"] * 2) == (0, 1)
    assert Grid.of(8, 1).co_located(["a"] * 4 + ["b"] * 4) == ()
