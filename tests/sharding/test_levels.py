"""Reductions and gathers on two levels: the tree of each sum, and what the bits depend on."""

from collections.abc import Sequence
from datetime import timedelta
from typing import Any, get_args

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

from lightning_replica.core.grid import Grid
from lightning_replica.errors import ConfigurationError
from lightning_replica.groups.membership import Groups, make_groups
from lightning_replica.sharding.commit import Request
from lightning_replica.sharding.layout import Partition, plan_layout
from tests.sharding.test_peers import train
from tests.support.ranks import open_world, run_ranks
from tests.support.sharded import apply, make_state, same_bits

LIMIT = timedelta(seconds=60)
SIZE = 8
SHAPES = ((33, 5), (7,), (64, 3), (1,))


def tree(gradients: Sequence[Tensor], nodes: int, wire: torch.dtype | None) -> Tensor:
    """The average of all ranks' gradients as [Note: two levels] says, written down once more."""
    dtype, local = gradients[0].dtype, len(gradients) // nodes
    if wire is not None and nodes > 1:
        means = [tree(gradients[node * local : (node + 1) * local], 1, None) for node in range(nodes)]
        total = means[0].to(wire).float()
        for mean in means[1:]:
            total = total + mean.to(wire).float()
        return (total / nodes).to(wire).to(dtype)
    narrow = dtype.itemsize == 2
    sums = []
    for node in range(nodes):
        total = gradients[node * local].to(torch.float32 if narrow else dtype)
        for gradient in gradients[node * local + 1 : (node + 1) * local]:
            total = total + gradient
        sums.append((total / local).to(dtype) if narrow else total)
    total = sums[0].to(torch.float32 if narrow else dtype)
    for each in sums[1:]:
        total = total + each
    return (total / nodes).to(dtype) if narrow else total / len(gradients)


def random_gradient(rank: int, step: int, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    generator = torch.Generator().manual_seed(1000 * step + rank)
    return torch.randn(shape, generator=generator).to(dtype)


def averages(groups: Groups, dtype: torch.dtype, **options: Any) -> None:
    """Every ``.grad`` has the bits of the tree, whatever R and the transport."""
    parameters = [nn.Parameter(torch.zeros(shape, dtype=dtype)) for shape in SHAPES]
    wire = getattr(torch, options["reduce_dtype"]) if "reduce_dtype" in options else None
    state = make_state(groups, parameters, torch.optim.SGD(parameters, lr=0.0), whole_gradients=True, **options)
    for step in range(2):
        state.begin_window(False)
        state.before_backward(reduce=True)
        own = [random_gradient(groups.rank, step, shape, dtype) for shape in SHAPES]
        sum((p * g).sum().float() for p, g in zip(parameters, own, strict=True)).backward()  # type: ignore[union-attr]
        state.after_backward(reduce=True)
        for parameter, shape in zip(parameters, SHAPES, strict=True):
            everyone = [random_gradient(rank, step, shape, dtype) for rank in range(SIZE)]
            assert parameter.grad is not None
            assert same_bits(parameter.grad, tree(everyone, groups.grid.nodes, wire)), (
                groups.grid,
                dtype,
                options,
                step,
            )
        apply(state)
        for parameter in parameters:
            parameter.grad = None
    state.release()


GRIDS = ((1, 1), (1, 2), (1, 8), (2, 1), (2, 2), (2, 4), (4, 1), (4, 2), (4, 4), (4, 8), (8, 1), (8, 2))  # M, R
CASES = (  # shared memory, partition, dtype, clip, reduce_dtype
    (True, "element", torch.float32, None, None),
    (False, "element", torch.float32, 0.01, None),
    (True, "element", torch.float32, 0.01, None),
    (False, "element", torch.bfloat16, None, None),
    (True, "parameter", torch.bfloat16, None, None),
    (False, "parameter", torch.float32, None, None),
    (True, "parameter", torch.float32, None, "bfloat16"),
    (False, "element", torch.float32, None, "bfloat16"),
    (True, "element", torch.float32, None, "float16"),
)


def train_all(rank: int, store: Any) -> list[Any]:
    open_world(rank, store, SIZE)
    results = []
    for nodes, replicas in GRIDS:
        groups = make_groups(Grid.of(SIZE, replicas, nodes), rank, LIMIT)
        for shared_memory, partition, dtype, clip, wire in CASES:
            options: dict[str, Any] = {"shared_memory": shared_memory, "partition": partition}
            options |= {} if wire is None else {"reduce_dtype": wire}
            averages(groups, dtype, **options)
            weights, _ = train(groups, dtype, Request(clip_norm=clip), **options)
            results.append([nodes, str(dtype), clip, wire, weights])
    return results


@pytest.mark.combinations
def test_the_bits_depend_on_the_nodes_and_the_gradients_only() -> None:
    found: dict[tuple[Any, ...], set[str]] = {}
    for nodes, *settings, weights in (run for rank in run_ranks(SIZE, train_all, timeout_s=300) for run in rank):
        found.setdefault((nodes, *settings), set()).add(weights)
    assert len(found) == 4 * 5
    assert all(len(hashes) == 1 for hashes in found.values()), found
    for nodes, dtype, clip, wire in found:
        if nodes == 8 and wire is None:  # one rank on every node: one level, as on one node
            assert found[8, dtype, clip, wire] == found[1, dtype, clip, wire]
    assert found[1, "torch.float32", None, "bfloat16"] == found[1, "torch.float32", None, None]
    of_two = [found[2, "torch.float32", None, wire] for wire in (None, "bfloat16", "float16")]
    assert len(set.union(*of_two, found[1, "torch.float32", None, None])) == 4


@given(st.integers(1, 4), st.integers(1, 4), st.data())
def test_what_a_node_sends_is_contiguous(nodes: int, local: int, data: st.DataObject) -> None:
    """Blocks are adjacent, and so are the pieces of a block, in order of node."""
    numels = data.draw(st.lists(st.integers(0, 300), min_size=1, max_size=12))
    partition = data.draw(st.sampled_from(get_args(Partition)))
    grid = Grid.of(nodes * local, 1, nodes)
    for bucket in plan_layout(grid, numels, data.draw(st.integers(1, 500)), partition, 4).buckets:
        assert [b.start for b in bucket.blocks[1:]] == [b.stop for b in bucket.blocks[:-1]]
        for position, block in enumerate(bucket.blocks):
            pieces = bucket.pieces[position::local]
            assert (pieces[0].start, pieces[-1].stop) == (block.start, block.stop)
            assert [piece.start for piece in pieces[1:]] == [piece.stop for piece in pieces[:-1]]


def test_the_picture_in_the_note() -> None:
    layout = plan_layout(Grid.of(4, 2, 2), [8], 8, align=1)
    assert [(piece.start, piece.stop) for piece in layout.buckets[0].pieces] == [(0, 2), (4, 6), (2, 4), (6, 8)]


def test_nodes_that_do_not_share_the_ranks_evenly() -> None:
    with pytest.raises(ConfigurationError, match=r"nodes=3 does not divide world_size=4"):
        Grid.of(4, 2, 3)
