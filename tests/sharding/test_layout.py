"""The layout by property: every element is owned exactly R times, ranges invert each other, padding is nobody's."""

from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lightning_replica.errors import ConfigurationError
from lightning_replica.grid import Grid
from lightning_replica.sharding.layout import Layout, plan_layout


@st.composite
def layouts(draw: st.DrawFn) -> tuple[Layout, list[int], int]:
    replicas, shards = draw(st.integers(1, 4)), draw(st.integers(1, 4))
    if replicas * shards == 1:
        shards = 2
    numels = draw(st.lists(st.integers(0, 300), min_size=1, max_size=12))
    align = draw(st.sampled_from([1, 2, 16]))
    layout = plan_layout(Grid(replicas * shards, replicas), numels, draw(st.integers(1, 500)), align)
    return layout, numels, align


@given(layouts())
def test_every_element_has_one_owner_shard(case: tuple[Layout, list[int], int]) -> None:
    layout, numels, _ = case
    owned: Counter[tuple[int, int]] = Counter()
    for shard in range(layout.grid.shards):
        for piece in layout.pieces(shard):
            owned.update((piece.parameter, i) for i in range(piece.param.start, piece.param.stop))
    assert owned == Counter((index, i) for index, numel in enumerate(numels) for i in range(numel))


@given(layouts())
def test_ranges_invert_each_other(case: tuple[Layout, list[int], int]) -> None:
    layout, _, _ = case
    for shard in range(layout.grid.shards):
        end = 0
        for piece in layout.pieces(shard):
            assert piece.world.numel == piece.local.numel == piece.param.numel > 0
            assert piece.world == piece.param.shift(layout.world[piece.parameter].start)
            assert end <= piece.local.start <= piece.local.stop <= layout.local_numel
            end = piece.local.stop
            bucket = next(b for b in layout.buckets if b.world.overlap(piece.world).numel)
            rank = (piece.world.start - bucket.world.start) // bucket.piece_numel
            assert layout.grid.shard_of(rank) == shard
            inside = piece.world.start - bucket.piece(rank).start
            assert piece.local.start == bucket.local(layout.grid.replica_of(rank)).start + inside


@given(layouts())
def test_buckets_tile_the_world_and_are_aligned(case: tuple[Layout, list[int], int]) -> None:
    layout, numels, align = case
    end = local = 0
    for bucket in layout.buckets:
        assert (bucket.world.start, bucket.local_start) == (end, local)
        assert bucket.world.numel == layout.grid.world_size * bucket.piece_numel
        assert bucket.piece_numel % align == 0
        assert bucket.piece_numel > 0
        end, local = bucket.world.stop, local + bucket.piece_numel * layout.grid.replicas
    assert (end, local) == (layout.world_numel, layout.local_numel)
    assert layout.local_numel * layout.grid.shards == layout.world_numel
    members = [index for bucket in layout.buckets for index in bucket.parameters]
    assert members == list(reversed(range(len(numels))))


@given(layouts())
def test_parameters_do_not_overlap(case: tuple[Layout, list[int], int]) -> None:
    layout, numels, _ = case
    ordered = sorted((r for r in layout.world if r.numel), key=lambda r: r.start)
    assert all(a.stop <= b.start for a, b in zip(ordered, ordered[1:], strict=False))
    assert [r.numel for r in layout.world] == numels


def test_the_picture_in_the_note() -> None:
    layout = plan_layout(Grid(4, 2), [8], 8, align=1)
    assert [(p.world.start, p.world.stop) for p in layout.pieces(0)] == [(0, 2), (4, 6)]
    assert [(p.local.start, p.local.stop) for p in layout.pieces(1)] == [(0, 2), (2, 4)]


def test_nothing_to_train() -> None:
    with pytest.raises(ConfigurationError, match=r"no parameter to train.*requires_grad"):
        plan_layout(Grid(2, 2), [], 10)
