"""What torch's and FairScale's own tests ask of their sharded optimizers, asked of `ReplicaOptimizer` in our words.

Their files are in no package; tests/upstream runs these where they are. What is here runs everywhere.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.join import Join
from torch.nn.parallel import DistributedDataParallel as DDP

from lightning_replica import ReplicaOptimizer
from tests.support.ranks import open_world, run_ranks

SGD = torch.optim.SGD


class WithArgument(SGD):
    """Its step takes one more argument."""

    def step(self, closure: Any = None, seen: Any = None) -> None:  # type: ignore[override]
        super().step()
        seen.append(len(self.param_groups))


class WithKey(SGD):
    """Its step leaves something in a param group."""

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        super().step()
        self.param_groups[0]["left"] = 0.5


class WithoutClosure(SGD):
    """Its step takes no closure."""

    def step(self) -> None:  # type: ignore[override]
        super().step()


def weight(value: float = 1.0, dtype: torch.dtype = torch.float32) -> nn.Parameter:
    parameter = nn.Parameter(torch.full((5,), value, dtype=dtype))
    parameter.grad = torch.ones_like(parameter)
    return parameter


def steps(rank: int, store: Any) -> list[Any]:
    """An optimizer of the user's own: what its step takes, leaves and returns."""
    open_world(rank, store, 2)
    seen: list[int] = []
    parameters = [weight() for _ in range(4)]
    with_argument = ReplicaOptimizer([parameters[0]], WithArgument, lr=0.5)
    with_argument.step(seen=seen)
    with_key = ReplicaOptimizer([parameters[1]], WithKey, replicas=1, lr=0.5)
    with_key.step()
    ReplicaOptimizer([parameters[2]], WithoutClosure, replicas=1, lr=0.5).step()
    returned = ReplicaOptimizer([parameters[3]], SGD, lr=0.5).step(lambda: 7)
    return [[each.tolist() for each in parameters], seen, with_key.param_groups[0]["left"], returned]


def test_steps_of_users_own_optimizers() -> None:
    assert run_ranks(2, steps) == [[[[0.5] * 5] * 4, [1], 0.5, 7]] * 2


def error_of(make: Callable[[], Any]) -> str:
    try:
        make()
    except Exception as error:
        return " ".join(each.__name__ for each in type(error).__mro__[:-2])
    return "none"


def given(rank: int, store: Any) -> list[str]:
    """What may be given as parameters, and what is raised otherwise."""
    open_world(rank, store, 2)
    net = nn.Linear(3, 2)
    params: list[Any] = [
        net.parameters(),
        list(net.parameters()),
        [{"params": [net.weight], "weight_decay": 0.1}, {"params": [net.bias]}],
        net.named_parameters(),
        [weight(), weight(dtype=torch.float64)],
        [torch.zeros(3)],
        [],
        torch.zeros(3),
        1.5,
        [net.weight, 42],
        [weight(), torch.sparse_coo_tensor(size=(2, 3), check_invariants=True)],  # type: ignore[call-arg]
    ]

    def step(each: Any) -> None:
        ReplicaOptimizer(each, SGD, lr=0.1).step()

    return [error_of(partial(step, each)) for each in params]


def test_what_may_be_given() -> None:
    """As torch's own optimizers; and parameters of several dtypes, which `ZeroRedundancyOptimizer` refuses."""
    for found in run_ranks(2, given):
        assert found[:6] == ["none"] * 6
        for error, kind in zip(found[6:], ["Value", "Type", "Type", "Type", "Value"], strict=True):
            assert f"{kind}Error" in error


def cleared(rank: int, store: Any) -> list[Any]:
    """More ranks than elements; no state before it is collected; no gradient after `zero_grad`."""
    open_world(rank, store, 4)
    net = nn.Linear(1, 1)
    optimizer = ReplicaOptimizer(net.parameters(), SGD, replicas=1, lr=0.1)
    net(torch.ones(2, 1)).sum().backward()
    before = net.weight.item()
    optimizer.step()
    optimizer.zero_grad()
    return [round(before - net.weight.item(), 6), [p.grad for p in net.parameters()], error_of(optimizer.state_dict)]


def test_a_shard_may_be_empty() -> None:
    for change, gradients, error in run_ranks(4, cleared):
        assert (change, gradients) == (0.2, [None, None])
        assert "RuntimeError" in error, "as `ZeroRedundancyOptimizer` raises"


def some_ranks(rank: int, store: Any, replicas: int) -> Any:
    """Only every second rank is in the group."""
    open_world(rank, store, 4)
    group = dist.new_group([0, 2])
    if rank % 2:
        return error_of(lambda: ReplicaOptimizer([weight()], SGD, process_group=group, lr=0.1))
    torch.manual_seed(rank)
    net = nn.Linear(4, 3)
    optimizer = ReplicaOptimizer(net.parameters(), SGD, replicas, group, lr=0.1, momentum=0.9)
    ddp = DDP(net, process_group=group)
    for _ in range(3):
        optimizer.zero_grad()
        ddp(torch.randn(2, 4)).square().sum().backward()
        optimizer.step()
    optimizer.consolidate_state_dict(to=1)  # a place in the group: rank 2
    return [[p.tolist() for p in net.parameters()], len(optimizer.state_dict()["state"]) if rank == 2 else 2]


@pytest.mark.parametrize("replicas", [1, 2])
def test_a_group_of_some_ranks(replicas: int) -> None:
    zero, one, two, three = run_ranks(4, some_ranks, replicas)
    assert "ConfigurationError" in one
    assert "ConfigurationError" in three
    assert zero == two
    assert zero[1] == 2


def frozen(rank: int, store: Any, name: str, maximize: bool) -> bool:
    """Parity with the optimizer itself, while a parameter is frozen and unfrozen, and across each other's state."""
    open_world(rank, store, 4)
    made = getattr(torch.optim, name)
    torch.manual_seed(0)
    nets = [nn.Sequential(nn.Linear(2, 3), nn.Linear(3, 3)) for _ in range(2)]
    nets[1].load_state_dict(nets[0].state_dict())
    ours = ReplicaOptimizer(nets[0].parameters(), made, replicas=2, lr=1e-2, maximize=maximize)
    plain = made(nets[1].parameters(), lr=1e-2, maximize=maximize)
    schedules = [torch.optim.lr_scheduler.StepLR(each, 2, 0.5) for each in (ours, plain)]
    ddps = [DDP(net, find_unused_parameters=True) for net in nets]
    same = True
    for step in range(8):
        batch = torch.randn(4, 2, generator=torch.Generator().manual_seed(10 * step + rank))
        for net, ddp, optimizer in zip(nets, ddps, (ours, plain), strict=True):
            net[0].weight.requires_grad = step % 3 != 2
            optimizer.zero_grad()
            ddp(batch).square().sum().backward()
            optimizer.step()
        if step == 4:  # each goes on with the state of the other
            ours.consolidate_state_dict(to=0)
            state = [ours.state_dict() if rank == 0 else None]
            dist.broadcast_object_list(state, 0)
            ours.load_state_dict(plain.state_dict())
            plain.load_state_dict(state[0])
        for schedule in schedules:
            schedule.step()
        same &= all(map(torch.equal, nets[0].parameters(), nets[1].parameters()))
    return same


@pytest.mark.parametrize(("name", "maximize"), [("Adam", False), ("AdamW", True), ("SGD", True)])
def test_frozen_for_a_time(name: str, maximize: bool) -> None:
    assert run_ranks(4, frozen, name, maximize) == [True] * 4


def joined_alone(rank: int, store: Any) -> list[float]:
    """The optimizer is all that is joined: no DDP tells the context that this rank has inputs."""
    open_world(rank, store, 4)
    parameter = weight()
    optimizer = ReplicaOptimizer([parameter], SGD, replicas=2, lr=0.25)
    with Join([optimizer]):
        for _ in range(rank):
            optimizer.step()
    return parameter.tolist()


def test_joined_without_ddp() -> None:
    assert run_ranks(4, joined_alone) == [[0.25] * 5] * 4
