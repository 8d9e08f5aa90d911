"""Real ranks: the sharded step against torch's own DDP and optimizers, and against itself with other R."""

import hashlib
from datetime import timedelta
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from lightning_replica.core.grid import Grid
from lightning_replica.core.pending_work import Ordered, all_ended
from lightning_replica.devices.gloo import abort_group
from lightning_replica.errors import ConfigurationError, Interrupted
from lightning_replica.groups.membership import make_groups
from lightning_replica.sharding.commit import Request
from lightning_replica.sharding.optimizer import check_optimizer
from tests.support.ranks import open_world, run_ranks
from tests.support.sharded import apply, commit, new_state
from tests.support.typed import grad_of, world_group

OPTIMIZERS: dict[str, dict[str, Any]] = {
    "SGD": {"lr": 0.1, "momentum": 0.9, "nesterov": True},
    "Adam": {"lr": 1e-2, "amsgrad": True},
    "AdamW": {"lr": 1e-2, "fused": True},
    "RMSprop": {"lr": 1e-2, "centered": True, "momentum": 0.5},
    "Adagrad": {"lr": 1e-2, "lr_decay": 0.5},
    "Adadelta": {},
    "Adamax": {},
    "NAdam": {},
    "RAdam": {},
    "ASGD": {},
    "Rprop": {},
}


def model() -> nn.Module:
    torch.manual_seed(0)
    # Two parameters of a bucket, one that spans several, an unused one and an empty one.
    net = nn.Sequential(nn.Linear(33, 50), nn.Tanh(), nn.Linear(50, 7), nn.Linear(7, 1))
    net.unused = nn.Parameter(torch.ones(5))
    net.empty = nn.Parameter(torch.ones(0))
    return net


def optimizer(net: nn.Module, name: str) -> torch.optim.Optimizer:
    parameters = list(net.parameters())
    groups = [{"params": parameters[::2]}, {"params": parameters[1::2], "lr": 3e-2}]
    return getattr(torch.optim, name)(groups, **OPTIMIZERS[name])


def train(
    rank: int,
    store: Any,
    world_size: int,
    replicas: int,
    name: str,
    clip: dict[str, float],
    accumulate: int = 1,
    shared: bool = True,
    on_host: bool = True,
) -> dict[str, Any]:
    open_world(rank, store, world_size)
    ours, theirs = model(), model()
    their_optimizer, our_optimizer = optimizer(theirs, name), optimizer(ours, name)
    ddp = DistributedDataParallel(theirs, find_unused_parameters=True)
    grid = Grid.of(world_size, replicas)
    state = new_state(grid, rank, ours.parameters(), [our_optimizer], shared_memory=shared)
    state.connect(make_groups(grid, rank, timedelta(seconds=60), on_host), lambda: None)
    torch.manual_seed(rank)
    for _ in range(4):
        state.begin_window(False)
        our_optimizer.zero_grad()
        their_optimizer.zero_grad()
        for part in range(accumulate):
            x = torch.randn(8, 33)
            last = part == accumulate - 1
            state.before_backward(reduce=last)
            ours(x).square().mean().backward()
            with ddp.no_sync() if not last else torch.enable_grad():
                ddp(x).square().mean().backward()
        request = Request(**{f"clip_{kind}": limit for kind, limit in clip.items()})
        state.reduce()
        agreed = commit(state, request)
        norm = torch.stack([p.grad.norm() for p in theirs.parameters() if p.grad is not None]).norm()
        torch.testing.assert_close(torch.tensor(agreed.grad_norm_sq).sqrt().float(), norm.float())
        if "norm" in clip:
            torch.nn.utils.clip_grad_norm_(theirs.parameters(), clip["norm"])
        if "value" in clip:
            torch.nn.utils.clip_grad_value_(theirs.parameters(), clip["value"])
        state.update()
        state.gather()
        their_optimizer.step()
    both = zip(ours.parameters(), theirs.parameters(), strict=True)
    difference = max(float((a - b).detach().abs().max()) for a, b in both if a.numel())
    weights = hashlib.sha256(b"".join(p.detach().numpy().tobytes() for p in ours.parameters())).hexdigest()
    found = {"difference": difference, "weights": weights, "buckets": len(state.buffers[0].layout.buckets)}
    mappable = state.buffers[0].block.file >= 0
    return {**found, "mapped": state.gradients.is_mapped, "mappable": mappable}


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_an_element_wise_optimizer_trains_as_under_ddp(name: str) -> None:
    results = run_ranks(4, train, 4, 2, name, {})
    assert len({result["weights"] for result in results}) == 1, results
    assert results[0]["buckets"] > 1
    # Only the order of summation differs; one step moves weights by at most the learning rate, 0.03 to 1.
    assert results[0]["difference"] < 1e-5, results[0]


@pytest.mark.parametrize("clip", [{}, {"norm": 0.1}, {"value": 0.01}], ids=["none", "norm", "value"])
def test_the_bits_do_not_depend_on_replicas_or_on_how_they_move(clip: dict[str, float]) -> None:
    """Last come collectives that are put in order, as on a device, and awaited before the commit only."""
    cases = [(1, True), (2, True), (4, True), (1, False), (2, False), (1, False, False), (2, False, False)]
    runs = [run_ranks(4, train, 4, replicas, "AdamW", clip, 2, *how) for replicas, *how in cases]
    assert [run[0]["mapped"] for run in runs] == [case[1] for case in cases]
    assert [run[0]["mappable"] for run in runs] == [case[1] for case in cases]
    assert len({result["weights"] for run in runs for result in run}) == 1, runs
    assert runs[0][0]["difference"] < 2e-6


@pytest.mark.parametrize("world_size", [2, 3])
def test_other_worlds(world_size: int) -> None:
    results = run_ranks(world_size, train, world_size, world_size, "AdamW", {"norm": 0.1})
    assert len({result["weights"] for result in results}) == 1, results
    assert results[0]["difference"] < 2e-6


def move_shard(rank: int, store: Any) -> tuple[str, int]:
    """Rank 0 trains two steps; rank 1, fresh, takes its shard and both make one more."""
    open_world(rank, store, 2)
    net = model()
    grid = Grid.of(2, 2)
    state = new_state(grid, rank, net.parameters(), [optimizer(net, "AdamW")])
    state.connect(make_groups(grid, rank, timedelta(seconds=60)), lambda: None)

    def step() -> None:
        torch.manual_seed(state.step)
        state.optimizers[0].optimizer.zero_grad()
        state.before_backward(reduce=True)
        net(torch.randn(8, 33)).square().mean().backward()
        apply(state)

    step()
    step()
    manifest, tensors = state.export_shard()
    sent = [tensor.clone() for tensor in tensors]
    if rank == 1:
        state.buffers[0].main.fill_(float("nan"))
        state.optimizers[0].optimizer.state.clear()
        state.buffers[0].params.fill_(float("nan"))
        arriving = iter(sent)

        def receive(tensor: torch.Tensor) -> None:
            tensor.copy_(next(arriving))

        state.import_shard(manifest, receive)
        assert state.intact
    state.rebuild()
    step()
    return hashlib.sha256(state.buffers[0].params.numpy().tobytes()).hexdigest(), manifest["step"]


def test_a_shard_moves_whole() -> None:
    results = run_ranks(2, move_shard)
    assert results[0] == results[1]
    assert results[0][1] == 2


class Muonish(torch.optim.Optimizer):
    def __init__(self, params: Any) -> None:
        super().__init__(params, {})


def test_optimizers_that_cannot_be_cut() -> None:
    parameter = nn.Parameter(torch.ones(3))
    with pytest.raises(ConfigurationError, match=r"cannot shard LBFGS: it treats all parameters as one vector"):
        check_optimizer(torch.optim.LBFGS([parameter]), "parameter")
    with pytest.raises(ConfigurationError, match=r"cannot shard SparseAdam: it needs sparse gradients"):
        check_optimizer(torch.optim.SparseAdam([parameter]), "element")
    with pytest.raises(ConfigurationError, match=r"Muonish is not known.*partition='parameter'.*one of ASGD"):
        check_optimizer(Muonish([parameter]), "element")
    check_optimizer(Muonish([parameter]), "parameter")


def test_a_parameter_in_two_optimizers() -> None:
    parameter = nn.Parameter(torch.ones(3))
    optimizers = [torch.optim.SGD([parameter]), torch.optim.Adam([parameter])]
    with pytest.raises(ConfigurationError, match=r"Optimizers 0 and 1 hold the same parameter of shape \(3,\)"):
        new_state(Grid.of(2, 2), 0, [parameter], optimizers)


def without_end(rank: int, store: Any) -> Any:
    """A collective on rank 0's device is still under way when its gradient is asked for: it never gets that far."""
    open_world(rank, store, 2)
    if rank == 1:
        make_groups(Grid.of(2, 2), rank, timedelta(seconds=60), on_host=False)
        store.wait(["asked"])
        return True
    net = model().to(torch.bfloat16)  # a checkpoint has its main parameters
    adam = optimizer(net, "AdamW")
    state = new_state(Grid.of(2, 2), rank, net.parameters(), [adam], shared_memory=False)

    def check() -> None:
        raise Interrupted("the world moves on")

    state.connect(make_groups(state.grid, rank, timedelta(seconds=60), on_host=False), check)
    for ask in (partial(commit, state), partial(state.gather_optimizer, adam)):
        Ordered(dist.all_reduce(torch.ones(1), async_op=True))
        with pytest.raises(Interrupted):
            ask()
        assert not state.entered
        assert not all_ended(0.0)
    abort_group(world_group())
    store.set("asked", "1")
    return True


def test_no_commit_and_no_checkpoint_before_the_device_has_come_to_an_end() -> None:
    assert run_ranks(2, without_end) == [True, True]


def test_a_parameter_that_is_not_the_modules() -> None:
    parameter = nn.Parameter(torch.ones(3))
    with pytest.raises(ConfigurationError, match=r"SGD holds a parameter of shape \(3,\) that is not one of the"):
        new_state(Grid.of(2, 2), 0, [], [torch.optim.SGD([parameter])])


def test_gradients_live_in_the_flat_buffer_and_none_stays_none() -> None:
    parameters = [nn.Parameter(torch.ones(3)), nn.Parameter(torch.ones(2)), nn.Parameter(torch.ones(1))]
    state = new_state(Grid.of(2, 2), 0, parameters, [torch.optim.SGD(parameters)])
    buffers = state.buffers[0]
    buffers.grads.fill_(7.0)
    parameters[1].grad = torch.tensor([3.0, 4.0])
    (parameters[0].sum() + parameters[1].sum()).backward()
    buffers.complete(buffers.layout.buckets[0])
    assert [None if p.grad is None else p.grad.tolist() for p in parameters] == [[1.0, 1.0, 1.0], [4.0, 5.0], None]
    assert [buffers.whole(i, buffers.grads).tolist() for i in range(3)] == [[1.0, 1.0, 1.0], [4.0, 5.0], [0.0]]
    assert all(
        grad_of(p).untyped_storage().data_ptr() == buffers.grads.untyped_storage().data_ptr() for p in parameters[:2]
    )


def test_memory_format_is_kept() -> None:
    image = nn.Parameter(torch.randn(2, 3, 4, 5).to(memory_format=torch.channels_last))
    turned = nn.Parameter(torch.randn(3, 5).t())
    values = [image.detach().clone(), turned.detach().clone()]
    new_state(Grid.of(2, 1), 1, [image, turned], [torch.optim.SGD([image, turned])])
    assert image.is_contiguous(memory_format=torch.channels_last)
    assert turned.stride() == (1, 5)
    assert all(torch.equal(a, b) for a, b in zip((image, turned), values, strict=True))
