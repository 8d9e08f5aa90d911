"""Which rank has which coordinates, against megatron-core's own numbering."""

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lightning_replica.errors import ConfigurationError
from lightning_replica.megatron.sizes import ParallelSizes

SIZES = st.integers(1, 4)


@given(SIZES, SIZES, st.integers(1, 3), SIZES)
def test_ranks_are_numbered_as_by_megatron(tensor: int, pipeline: int, context: int, data: int) -> None:
    from megatron.core.parallel_state import RankGenerator

    world = tensor * pipeline * context * data
    sizes = ParallelSizes(tensor, pipeline, context)
    theirs = RankGenerator(tp=tensor, ep=1, dp=data, pp=pipeline, cp=context, order="tp-cp-ep-dp-pp")
    grids = sizes.grids(world, 1, 1)
    assert sorted(grid.ranks for grid in grids.grids) == sorted(tuple(ranks) for ranks in theirs.get_ranks("dp-cp"))
    assert sizes.data_parallel_size(world) == data
    for ranks in theirs.get_ranks("tp"):
        assert [sizes.tensor_rank(rank) for rank in ranks] == list(range(tensor))
    for ranks in theirs.get_ranks("dp"):
        assert [sizes.data_parallel_rank(rank, world) for rank in ranks] == list(range(data))
    for ranks in theirs.get_ranks("tp-cp-pp"):
        assert len({sizes.data_parallel_rank(rank, world) for rank in ranks}) == 1


@given(SIZES, st.integers(1, 3), SIZES, SIZES, st.sampled_from([1, 2]))
def test_experts_are_divided_as_by_megatron(tensor: int, pipeline: int, expert: int, data: int, replicas: int) -> None:
    from megatron.core.parallel_state import RankGenerator

    world = tensor * pipeline * expert * data * replicas
    sizes = ParallelSizes(tensor, pipeline, 1, expert)
    theirs = RankGenerator(tp=tensor, ep=expert, dp=data * replicas, pp=pipeline, cp=1, order="tp-cp-ep-dp-pp")
    grids = sizes.grids(world, replicas, 1)
    experts = grids.experts or grids.grids
    assert sorted(grid.ranks for grid in experts) == sorted(tuple(ranks) for ranks in theirs.get_ranks("dp"))
    assert len({grid.divisor for grid in (*experts, *grids.grids)}) == 1, "a gradient is a mean over the same data"
    for ranks in theirs.get_ranks("tp-ep-pp"):
        assert len({sizes.experts_name(rank, world) for rank in ranks}) == len(ranks)
    for ranks in theirs.get_ranks("dp"):
        assert len({sizes.experts_name(rank, world) for rank in ranks}) == 1
    for ranks in theirs.get_ranks("tp"):
        assert [sizes.experts_tensor_rank(rank) for rank in ranks] == list(range(tensor))


def test_experts_with_tensor_ranks_of_their_own() -> None:
    grids = ParallelSizes(2, 1, 1, 4, 1).grids(8, 2, 1)
    assert [grid.ranks for grid in grids.grids] == [(0, 2, 4, 6), (1, 3, 5, 7)]
    assert [grid.ranks for grid in grids.experts] == [(0, 4), (1, 5), (2, 6), (3, 7)]
    assert {grid.divisor for grid in grids.experts} == {4}


def test_peers_of_every_grid_stand_on_different_nodes() -> None:
    grids = ParallelSizes(tensor_model_parallel_size=2).grids(8, 2, 2)
    assert [grids.peers(rank) for rank in range(4)] == [(0, 4), (1, 5), (2, 6), (3, 7)]
    assert [grid.nodes for grid in grids.grids] == [2, 2]
    assert grids.co_located(["a"] * 4 + ["b"] * 4) == ()


def test_a_stage_on_a_node_is_told_of() -> None:
    grids = ParallelSizes(pipeline_model_parallel_size=2).grids(4, 2, 2)
    assert [grid.nodes for grid in grids.grids] == [1, 1]
    assert grids.co_located(["a", "a", "b", "b"]) == ("0 of tensor rank 0 of stage 0", "0 of tensor rank 0 of stage 1")


@pytest.mark.parametrize(
    ("sizes", "world", "replicas", "said"),
    [
        (ParallelSizes(2, 2), 6, 1, "take 4 ranks for one copy of the model, which does not divide world_size=6"),
        (ParallelSizes(2, 2), 8, 4, "replicas=4 does not divide the 2 ranks that have the same parameters"),
        (ParallelSizes(1, 1, 1, 2), 2, 2, "replicas=2 does not divide the 1 ranks that have the same experts"),
        (ParallelSizes(1, 2, 1, 4), 4, 1, "all experts of a stage take 4 ranks, which does not divide the 2 ranks"),
    ],
)
def test_sizes_that_do_not_fit(sizes: ParallelSizes, world: int, replicas: int, said: str) -> None:
    with pytest.raises(ConfigurationError, match=said):
        sizes.grids(world, replicas, 1)


def test_a_size_of_nothing() -> None:
    with pytest.raises(ConfigurationError, match="pipeline_model_parallel_size"):
        ParallelSizes(1, 0)
    with pytest.raises(ConfigurationError, match="expert_tensor_parallel_size"):
        ParallelSizes(2, expert_tensor_parallel_size=0)


def test_experts_that_megatron_would_not_mark() -> None:
    with pytest.raises(ConfigurationError, match="differs from tensor_model_parallel_size=2"):
        ParallelSizes(2, expert_tensor_parallel_size=1)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"virtual_pipeline_model_parallel_size": 2}, "pipeline_model_parallel_size is 1"),
        ({"sequence_parallel": True}, "tensor_model_parallel_size is 1"),
    ],
    ids=str,
)
def test_what_needs_another_size(options: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigurationError, match=said):
        ParallelSizes(**options)
