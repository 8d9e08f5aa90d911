"""Helpers to drive `ShardedState` step by step inside `run_ranks`, many states in one world."""

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from lightning_replica.grid import Grid
from lightning_replica.sharding.collectives import Groups, make_groups
from lightning_replica.sharding.state import ShardedState
from tests.support.ranks import open_world


def open_groups(rank: int, store: Any, world_size: int, replicas: int) -> Groups:
    """The default group and those of one grid."""
    open_world(rank, store, world_size)
    return make_groups(Grid(world_size, replicas), rank, 60)


def make_state(groups: Groups, parameters: Iterable[nn.Parameter], *optimizers: Optimizer, **options: Any) -> Any:
    """A connected state; buckets of 1000 bytes unless ``options`` say otherwise."""
    options = {"bucket_bytes": 1000, **options}
    state = ShardedState(groups.grid, groups.rank, list(parameters), list(optimizers), **options)
    state.connect(groups, lambda: None)
    return state


def apply(state: ShardedState) -> None:
    """From the gradients of one backward pass to the gathered parameters."""
    state.reduce()
    state.commit()
    state.update()
    state.gather()


def train_step(state: ShardedState, backward: Callable[[], None], zero: bool = True) -> None:
    """A whole step of one batch."""
    state.begin_window(False)
    if zero:
        for optimizer in state.optimizers:
            optimizer.optimizer.zero_grad()
    state.before_backward(reduce=True)
    backward()
    state.after_backward(reduce=True)
    apply(state)


def exact_gradients(shapes: Sequence[Sequence[int]], dtypes: Sequence[torch.dtype], seed: int) -> list[Tensor]:
    """Random gradients, all mantissa bits in use, the same on every rank."""
    generator = torch.Generator().manual_seed(seed)
    return [
        torch.randn(tuple(shape), generator=generator).to(dtype) for shape, dtype in zip(shapes, dtypes, strict=True)
    ]


def exact_share(gradient: Tensor, groups: Groups) -> Tensor:
    """This rank's share of ``N * gradient``: every element comes from one rank alone.

    For N a power of two the average over ranks is then ``gradient`` to the last bit, whatever the order of summation.
    """
    world_size = groups.grid.world_size
    owner = torch.arange(gradient.numel()).view(gradient.shape) % world_size
    return torch.where(owner == groups.rank, gradient * world_size, torch.zeros_like(gradient))


def feed(parameters: Sequence[Tensor], gradients: Sequence[Tensor]) -> None:
    """A backward pass that gives every parameter exactly its gradient."""
    pairs = [(p, g) for p, g in zip(parameters, gradients, strict=True) if p.requires_grad]
    sum(((p * g).sum().float() for p, g in pairs), torch.zeros(())).backward()


def same_bits(a: Tensor, b: Tensor) -> bool:
    """Whether two tensors have dtype, shape and every bit in common."""
    if a.dtype != b.dtype or a.shape != b.shape:
        return False
    return torch.equal(
        a.detach().contiguous().view(-1).view(torch.uint8), b.detach().contiguous().view(-1).view(torch.uint8)
    )


def distance(a: Tensor, b: Tensor) -> float:
    """The largest difference, in units of the reference's largest element."""
    if not a.numel():
        return 0.0
    a, b = a.detach().double(), b.detach().double()
    return float((a - b).abs().max() / b.abs().max().clamp_min(1e-30))
