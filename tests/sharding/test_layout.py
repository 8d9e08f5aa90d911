"""The layout by property: every element is owned exactly R times, ranges invert each other, padding is nobody's."""

from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lightning_replica.core.grid import Grid
from lightning_replica.errors import ConfigurationError
from lightning_replica.sharding.layout import Layout, Partition, balance, plan_layout


@st.composite
def layouts(draw: st.DrawFn) -> tuple[Layout, list[int], int, Partition, int]:
    replicas, shards = draw(st.integers(1, 4)), draw(st.integers(1, 4))
    numels = draw(st.lists(st.integers(0, 300), min_size=1, max_size=12))
    align = draw(st.sampled_from([1, 2, 16]))
    partition: Partition = draw(st.sampled_from(["element", "parameter"]))
    grid = Grid.of(replicas * shards, replicas)
    bucket_numel = draw(st.integers(1, 500))
    return plan_layout(grid, numels, bucket_numel, partition, align), numels, align, partition, bucket_numel


Case = tuple[Layout, list[int], int, Partition, int]


@given(layouts())
def test_every_element_has_one_owner_shard(case: Case) -> None:
    layout, numels, _, partition, _ = case
    owned: Counter[tuple[int, int]] = Counter()
    for shard in range(layout.grid.shards):
        for piece in layout.pieces(shard):
            owned.update((piece.parameter, i) for i in range(piece.param.start, piece.param.stop))
            if partition == "parameter":
                assert piece.param.numel == numels[piece.parameter]
    assert owned == Counter((index, i) for index, numel in enumerate(numels) for i in range(numel))


@given(layouts())
def test_ranges_invert_each_other(case: Case) -> None:
    layout = case[0]
    for shard in range(layout.grid.shards):
        end = 0
        for piece in layout.pieces(shard):
            assert piece.world.numel == piece.local.numel == piece.param.numel > 0
            assert piece.world == piece.param.shift(layout.world[piece.parameter].start)
            assert end <= piece.local.start <= piece.local.stop <= layout.local_numels[shard]
            end = piece.local.stop
            bucket = next(b for b in layout.buckets if b.world.overlap(piece.world).numel)
            rank = next(r for r, where in enumerate(bucket.pieces) if where.overlap(piece.world).numel)
            assert layout.grid.shard_of(rank) == shard
            inside = piece.world.start - bucket.pieces[rank].start
            assert piece.local.start == bucket.locals[rank].start + inside


@given(layouts())
def test_buckets_tile_the_world_and_are_aligned(case: Case) -> None:
    layout, numels, align, partition, bucket_numel = case
    end, local_ends = 0, [0] * layout.grid.shards
    for bucket in layout.buckets:
        assert bucket.world.numel > 0
        for rank, (piece, local) in enumerate(zip(bucket.pieces, bucket.locals, strict=True)):
            shard = layout.grid.shard_of(rank)
            assert (piece.start, local.start) == (end, local_ends[shard])
            assert piece.numel == local.numel
            assert piece.numel % align == 0
            end, local_ends[shard] = piece.stop, local.stop
        assert len({piece.numel for piece in bucket.pieces}) == 1 or partition == "parameter"
    assert (end, tuple(local_ends)) == (layout.world_numel, layout.local_numels)
    assert sum(layout.local_numels) == layout.world_numel
    members = [index for bucket in layout.buckets for index in bucket.parameters]
    if partition == "element":
        assert list(dict.fromkeys(members)) == list(reversed(range(len(numels))))
        for bucket in layout.buckets:  # a bucket has the parameters that lie in it, in part or whole
            inside = {i for i, where in enumerate(layout.world) if where.overlap(bucket.world).numel}
            assert inside == {i for i in bucket.parameters if numels[i]}
            assert bucket.world.numel < bucket_numel + 2 * align * layout.grid.size
    else:
        assert sorted(members) == list(range(len(numels)))


@given(st.lists(st.integers(0, 1000), min_size=1, max_size=40), st.integers(1, 8))
def test_whole_parameters_are_balanced(numels: list[int], ranks: int) -> None:
    loads = [0] * ranks
    for numel, owner in zip(numels, balance(numels, ranks), strict=True):
        loads[owner] += numel
    assert max(loads) <= max(max(numels), 4 / 3 * sum(numels) / ranks + max(numels) / 3)
    assert max(loads) - min(loads) <= max(numels)


@given(layouts())
def test_parameters_do_not_overlap(case: Case) -> None:
    layout, numels, *_ = case
    ordered = sorted((r for r in layout.world if r.numel), key=lambda r: r.start)
    assert all(a.stop <= b.start for a, b in zip(ordered, ordered[1:], strict=False))
    assert [r.numel for r in layout.world] == numels
    assert all(r.start % case[2] == 0 for r in layout.world)


def test_the_picture_in_the_note() -> None:
    layout = plan_layout(Grid.of(4, 2), [8], 8, align=1)
    assert [(p.world.start, p.world.stop) for p in layout.pieces(0)] == [(0, 2), (4, 6)]
    assert [(p.local.start, p.local.stop) for p in layout.pieces(1)] == [(0, 2), (2, 4)]


def test_nothing_to_train() -> None:
    with pytest.raises(ConfigurationError, match=r"no parameter to train.*requires_grad"):
        plan_layout(Grid.of(2, 2), [], 10)
