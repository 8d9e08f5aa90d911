"""A hundred steps against three references that share no code with the package: DDP, FSDP2's HSDP, and one process."""

from collections.abc import Callable, Iterator
from contextlib import nullcontext
from copy import deepcopy
from datetime import timedelta
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel
from torch.optim import SGD, AdamW, Optimizer

from lightning_replica.core.grid import Grid
from lightning_replica.groups.membership import Groups, make_groups
from tests.support.ranks import run_ranks
from tests.support.sharded import Case, apply, make_state, run_cases, same_bits

STEPS = 100
MAKERS: dict[str, Callable[[Any], Optimizer]] = {
    "AdamW": lambda parameters: AdamW(parameters, lr=1e-3),
    "SGD": lambda parameters: SGD(parameters, lr=0.05, momentum=0.9),
}


def model() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(16, 32), nn.Tanh(), nn.LayerNorm(32), nn.Linear(32, 24), nn.Tanh(), nn.Linear(24, 4))


def batches(world_size: int, accumulate: int = 1) -> Iterator[list[tuple[Tensor, Tensor]]]:
    """For every step and every one of its batches: inputs and targets of all ranks, (world_size, 8, ...)."""
    generator = torch.Generator().manual_seed(1)
    for _ in range(STEPS):
        inputs = [torch.randn(world_size, 8, 16, generator=generator) for _ in range(accumulate)]
        yield [(each, each[..., :4] * each[..., 4:8]) for each in inputs]


def loss(net: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    return nn.functional.mse_loss(net(x), y)


def train(groups: Groups, make: Callable[[Any], Optimizer], accumulate: int = 1, **options: Any) -> nn.Module:
    """Our model after `STEPS` steps."""
    net = model()
    optimizer = make(net.parameters())
    state = make_state(groups, net.parameters(), optimizer, **options)
    for step in batches(groups.grid.size, accumulate):
        state.begin_window(False)
        optimizer.zero_grad()
        for number, (x, y) in enumerate(step):
            last = number == accumulate - 1
            state.before_backward(reduce=last)
            (loss(net, x[groups.rank], y[groups.rank]) / accumulate).backward()
            state.after_backward(reduce=last)
        apply(state)
    state.release()
    return net


def train_ddp(groups: Groups, make: Callable[[Any], Optimizer], accumulate: int) -> nn.Module:
    net = model()
    optimizer, ddp = make(net.parameters()), DistributedDataParallel(net)
    for step in batches(groups.grid.size, accumulate):
        optimizer.zero_grad()
        for number, (x, y) in enumerate(step):
            with nullcontext() if number == accumulate - 1 else ddp.no_sync():
                (loss(ddp, x[groups.rank], y[groups.rank]) / accumulate).backward()
        optimizer.step()
    return net


def relative_distance(ours: nn.Module, theirs: list[Tensor]) -> float:
    """2-norm of the difference of all weights, relative to that of the weights."""
    a = torch.cat([p.detach().double().flatten() for p in ours.parameters()])
    b = torch.cat([p.detach().double().flatten() for p in theirs])
    return float((a - b).norm() / b.norm())


def as_ddp_of_two(groups: Groups) -> None:
    """Two addends commute, halving is exact: not one bit may differ. DDP adds up a window's gradients as we do."""
    alone = make_groups(Grid.of(2, 1), groups.rank, timedelta(seconds=60))
    for make, accumulate in zip(MAKERS.values(), (1, 3), strict=True):
        theirs = train_ddp(groups, make, accumulate)
        for each, options in (
            (groups, {}),
            (alone, {"partition": "parameter"}),
            (groups, {"whole_gradients": True}),
        ):
            ours = train(each, make, accumulate, **options)
            assert all(same_bits(a, b) for a, b in zip(ours.parameters(), theirs.parameters(), strict=True))


def as_hybrid_fsdp(groups: Groups) -> None:
    """FSDP2 reduces in its replica first: another order of summation of four addends, so the last bits differ."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    for name, make in MAKERS.items():
        net = model()
        for layer in net:
            if isinstance(layer, nn.Linear):
                fully_shard(layer, mesh=mesh)
        fully_shard(net, mesh=mesh)
        optimizer = make(net.parameters())
        for ((x, y),) in batches(4):
            optimizer.zero_grad()
            loss(net, x[groups.rank], y[groups.rank]).backward()
            optimizer.step()
        theirs = [p.full_tensor() for p in net.parameters() if isinstance(p, DTensor)]
        off = relative_distance(train(groups, make), theirs)
        assert off < 1e-6, (name, off)


def as_one_process_with_the_whole_batch(groups: Groups) -> None:
    """One process averages over 32 samples, four ranks over 8 and then over ranks: other orders of summation."""
    for name, make in MAKERS.items():
        net = model()
        start = deepcopy(net)
        optimizer = make(net.parameters())
        for ((x, y),) in batches(4):
            optimizer.zero_grad()
            loss(net, x.flatten(0, 1), y.flatten(0, 1)).backward()
            optimizer.step()
        off = relative_distance(train(groups, make), list(net.parameters()))
        assert off < 1e-6, (name, off)
        assert relative_distance(start, list(net.parameters())) > 0.01


def outcomes_of(world_size: int, cases: list[Case]) -> list[dict[str, str]]:
    return run_ranks(world_size, run_cases, world_size, 2, cases, timeout_s=150)


@pytest.mark.parametrize(
    ("world_size", "case"),
    [(2, as_ddp_of_two), (4, as_hybrid_fsdp), (4, as_one_process_with_the_whole_batch)],
    ids=lambda value: getattr(value, "__name__", str(value)),
)
def test_a_hundred_steps(world_size: int, case: Case) -> None:
    for rank, outcome in enumerate(outcomes_of(world_size, [case])):
        assert outcome.get(case.__name__) == "ok", f"rank {rank}: {outcome.get(case.__name__, outcome)}"
