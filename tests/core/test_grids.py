"""Several grids in one table."""

import pytest

from lightning_replica.core.grid import Grid
from lightning_replica.core.grids import Grids
from lightning_replica.errors import ConfigurationError

TWO = Grids((Grid((0, 2, 4, 6), 2), Grid((1, 3, 5, 7), 2)), ("a", "b"))


def test_shards_are_numbered_through() -> None:
    assert [TWO.shard_of(rank) for rank in range(8)] == [0, 2, 1, 3, 0, 2, 1, 3]
    assert (TWO.size, TWO.shards, TWO.replicas) == (8, 4, 2)
    assert [TWO.shard_name(shard) for shard in range(4)] == ["0 of a", "1 of a", "0 of b", "1 of b"]
    assert [TWO.peers(rank) for rank in (0, 1, 2, 7)] == [(0, 4), (1, 5), (2, 6), (3, 7)]


def test_the_holders_of_a_shard_are_those_that_own_it() -> None:
    for rank in range(8):
        assert {other for other in range(8) if TWO.shard_of(other) == TWO.shard_of(rank)} == set(TWO.peers(rank))


def test_ranks_that_have_the_same_part_of_the_model() -> None:
    assert Grids.of(Grid.of(4, 2)).same_part(1) == (0, 1, 2, 3)
    tensor = Grid((0, 2, 4, 6), 2), Grid((1, 3, 5, 7), 2)
    assert Grids(tensor, ("a", "b")).same_part(5) == (1, 3, 5, 7)
    experts = tuple(Grid((first, first + 4), 2) for first in range(4))
    assert Grids(tensor, ("a", "b"), experts).same_part(5) == (1, 5)


def test_one_grid_is_like_the_grid() -> None:
    grid = Grid.of(6, 2)
    one = Grids.of(grid)
    assert [one.shard_of(rank) for rank in range(6)] == [grid.shard_of(rank) for rank in range(6)]
    assert [one.shard_name(shard) for shard in range(3)] == [grid.shard_name(shard) for shard in range(3)] == [*"012"]
    assert one.co_located([*"aabbab"]) == tuple(map(str, grid.co_located([*"aabbab"])))


@pytest.mark.parametrize(
    "grids",
    [(Grid((0, 1), 1), Grid((1, 2), 1)), (Grid((0, 1), 1), Grid((3, 4), 1)), (Grid((0, 1), 1), Grid((2, 3), 2))],
)
def test_grids_that_make_no_world(grids: tuple[Grid, ...]) -> None:
    with pytest.raises(ConfigurationError):
        Grids(grids, tuple("ab"))
