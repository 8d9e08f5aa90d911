"""`ReplicaOptimizer` against the optimizer that it shards, under DDP and alone."""

import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.join import Join
from torch.nn.parallel import DistributedDataParallel as DDP

from lightning_replica import ReplicaOptimizer
from lightning_replica.errors import ConfigurationError, CorruptedShardError, UncollectedStateError
from tests.support.ranks import open_world, run_ranks

WORLD = 4


def model() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(5, 33), nn.Tanh(), nn.Linear(33, 7), nn.Tanh(), nn.Linear(7, 1))


def batch(rank: int, step: int) -> torch.Tensor:
    return torch.randn(4, 5, generator=torch.Generator().manual_seed(10 * step + rank))


def train(net: nn.Module, optimizer: Any, rank: int, steps: range) -> list[list[float]]:
    """Under DDP, which averages the gradients."""
    ddp = DDP(net)
    for step in steps:
        optimizer.zero_grad()
        ddp(batch(rank, step)).square().mean().backward()
        optimizer.step()
    return [p.detach().flatten().tolist() for p in net.parameters()]


def same_as(rank: int, store: Any, name: str, options: dict[str, Any], **sharded: Any) -> Any:
    open_world(rank, store, WORLD)
    made: Any = getattr(torch.optim, name)
    whole, net = model(), model()
    plain = made(whole.parameters(), **options)
    expected = train(whole, plain, rank, range(4))
    ours = ReplicaOptimizer(net.parameters(), made, **sharded, **options)
    found = train(net, ours, rank, range(4))
    digests: list[Any] = [None] * WORLD
    dist.all_gather_object(digests, (ours.shard, ours.shard_digest()))
    ours.consolidate_state_dict(to=1)
    state = ours.state_dict() if rank == 1 else None
    same_state = state is None or all(
        torch.equal(torch.as_tensor(value), torch.as_tensor(state["state"][number][key]))
        for number, entries in plain.state_dict()["state"].items()
        for key, value in entries.items()
    )
    return [found == expected, len(set(digests)), same_state]


@pytest.mark.parametrize("replicas", [1, 2, 4])
@pytest.mark.parametrize("shared_memory", [True, False])
def test_the_bits_are_those_of_the_optimizer_itself(replicas: int, shared_memory: bool) -> None:
    options = {"lr": 1e-2, "weight_decay": 0.1}
    kwargs = {"replicas": replicas, "shared_memory": shared_memory}
    for result in run_ranks(WORLD, _with, "AdamW", options, kwargs):
        assert result == [True, WORLD // replicas, True]


def _with(rank: int, store: Any, name: str, options: dict[str, Any], kwargs: dict[str, Any]) -> Any:
    return same_as(rank, store, name, options, **kwargs)


@pytest.mark.parametrize(("name", "options"), [("SGD", {"lr": 0.1, "momentum": 0.9}), ("Adafactor", {"lr": 0.1})])
def test_other_optimizers(name: str, options: dict[str, Any]) -> None:
    partition = "parameter" if name == "Adafactor" else "element"
    for same, _, same_state in run_ranks(WORLD, _with, name, options, {"partition": partition}):
        assert (same, same_state) == (True, True)


def goes_on(rank: int, store: Any) -> Any:
    """A state that was collected, or that a plain optimizer has written, is loaded by another."""
    open_world(rank, store, WORLD)
    options: dict[str, Any] = {"lr": 1e-2}
    whole = model()
    plain = torch.optim.AdamW(whole.parameters(), **options)
    train(whole, plain, rank, range(2))
    net = model()
    net.load_state_dict(whole.state_dict())
    ours = ReplicaOptimizer(net.parameters(), torch.optim.AdamW, replicas=2, **options)
    ours.load_state_dict(plain.state_dict())
    expected, found = train(whole, plain, rank, range(2, 4)), train(net, ours, rank, range(2, 4))
    schedule = torch.optim.lr_scheduler.StepLR(ours, 1, 0.5)
    ours.step()
    schedule.step()
    return [found == expected, ours.param_groups[0]["lr"], ours.optim.param_groups[0]["lr"]]


def test_a_plain_state_is_loaded() -> None:
    assert run_ranks(WORLD, goes_on) == [[True, 5e-3, 5e-3]] * WORLD


def of_16_bits(rank: int, store: Any) -> Any:
    """An optimizer that exists, of 16-bit weights: small steps add up in 32 bits, also after its state was loaded."""
    open_world(rank, store, WORLD)
    net, other = model().bfloat16(), model().bfloat16()
    mine = torch.optim.SGD(net.parameters(), lr=1e-4, momentum=0.9)
    ours = ReplicaOptimizer.of(mine, replicas=2)
    again = ReplicaOptimizer.of(torch.optim.SGD(other.parameters(), lr=1.0), replicas=4)

    def train(net: nn.Module, optimizer: Any, steps: int) -> list[list[float]]:
        for _ in range(steps):
            for parameter in net.parameters():
                parameter.grad = torch.full_like(parameter, 0.5)
            optimizer.step()
        return [p.tolist() for p in net.parameters()]

    before = [p.tolist() for p in net.parameters()]
    train(net, ours, 3)
    ours.consolidate_state_dict()
    (state,) = [ours.state_dict()] if rank == 0 else [None]
    received: list[Any] = [state]
    dist.broadcast_object_list(received)
    other.load_state_dict(net.state_dict())
    again.load_state_dict(received[0])
    torch.optim.SGD(model().parameters()).load_state_dict(received[0])  # passes over what it does not know
    rates = {group["lr"] for optimizer in (mine, ours, again) for group in optimizer.param_groups}
    return [train(net, ours, 20) == train(other, again, 20), [p.tolist() for p in net.parameters()] != before, *rates]


def test_weights_of_16_bits() -> None:
    assert run_ranks(WORLD, of_16_bits) == [[True, True, 1e-4]] * WORLD


def added(rank: int, store: Any) -> Any:
    open_world(rank, store, WORLD)
    results = []
    for make in (torch.optim.Adam, lambda params, lr: ReplicaOptimizer(params, torch.optim.Adam, lr=lr)):
        net = model()
        optimizer: Any = make(net[0].parameters(), lr=1e-2)
        train(net, optimizer, rank, range(2))
        optimizer.add_param_group({"params": list(net[2].parameters()), "lr": 1e-3})
        results.append(train(net, optimizer, rank, range(2, 5)))
    return results[0] == results[1]


def test_a_param_group_that_is_added() -> None:
    assert run_ranks(WORLD, added) == [True] * WORLD


def without_ddp(rank: int, store: Any) -> Any:
    """Ranks begin with weights of their own, compute the same gradients, and one parameter gets none."""
    open_world(rank, store, WORLD)
    torch.manual_seed(rank)
    first, later, unused = (nn.Parameter(torch.randn(7, 5)) for _ in range(3))
    ours = ReplicaOptimizer([first, unused], torch.optim.AdamW, replicas=2, lr=1e-2, weight_decay=0.5)
    before = unused.tolist()
    for step in range(4):
        if step == 2:
            ours.add_param_group({"params": [later]})
        for parameter in (first, later) if step >= 2 else (first,):
            parameter.grad = torch.full_like(parameter, float(step + 1))
        ours.step()
    return [first.tolist(), later.tolist(), unused.tolist() == before, ours.shard, ours.shard_digest()]


def test_alone() -> None:
    results = run_ranks(WORLD, without_ddp)
    assert all(each[:3] == results[0][:3] for each in results)
    assert results[0][2], "without a gradient, weight decay does not touch it"
    assert len({(shard, found) for *_, shard, found in results}) == 2


def moved(rank: int, store: Any) -> Any:
    """A new process would do what rank 0 does here: it takes the shard of its peer."""
    open_world(rank, store, WORLD)
    net = model()
    ours = ReplicaOptimizer(net.parameters(), torch.optim.AdamW, replicas=2, lr=1e-2)
    train(net, ours, rank, range(3))
    before, (first, peer) = ours.shard_digest(), ours.peers if rank in (0, 2) else (1, 3)
    if rank in (0, 2):
        manifest, tensors = ours.export_shard()
        if rank == peer:
            for tensor in tensors:
                dist.send(tensor.contiguous(), first)
        else:
            for values in ours._sharded.buffers:
                values.main.fill_(torch.nan)
            ours.optim.state.clear()

            def receive(tensor: torch.Tensor) -> None:
                dist.recv(tensor, peer)

            ours.import_shard(manifest, receive)
    dist.barrier()
    return [ours.shard_digest() == before, train(net, ours, rank, range(3, 5))]


def test_a_shard_comes_from_a_peer() -> None:
    results = run_ranks(WORLD, moved)
    assert [same for same, _ in results] == [True] * WORLD
    assert all(weights == results[0][1] for _, weights in results)


def joined(rank: int, store: Any) -> Any:
    """Ranks have inputs of different numbers; those that are done go on making steps."""
    open_world(rank, store, WORLD)
    net = model()
    ddp = DDP(net)
    optimizer = ReplicaOptimizer(net.parameters(), torch.optim.SGD, replicas=2, lr=0.1, momentum=0.9)
    with Join([ddp, optimizer]):
        for step in range(3 * rank):  # the first has none
            optimizer.zero_grad()
            ddp(batch(rank, step)).square().mean().backward()
            optimizer.step()
    return [[p.detach().flatten().tolist() for p in net.parameters()], optimizer.shard_digest()]


def alone() -> list[list[float]]:
    """The same in one process: the average over the initial number of ranks, of those that have inputs."""
    net = model()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9)
    for step in range(3 * (WORLD - 1)):
        optimizer.zero_grad()
        for rank in (rank for rank in range(WORLD) if step < 3 * rank):
            (net(batch(rank, step)).square().mean() / WORLD).backward()
        optimizer.step()
    return [p.detach().flatten().tolist() for p in net.parameters()]


def test_uneven_inputs_under_torch_s_join() -> None:
    results = run_ranks(WORLD, joined)
    assert all(weights == results[0][0] for weights, _ in results)
    assert [each for _, each in results[:2]] == [each for _, each in results[2:]], "peers have the same shard"
    for ours, expected in zip(results[0][0], alone(), strict=True):
        torch.testing.assert_close(torch.tensor(ours), torch.tensor(expected), rtol=1e-5, atol=1e-6)


def message_of(make: Callable[[], Any]) -> str:
    try:
        make()
    except (ConfigurationError, UncollectedStateError) as error:
        return str(error)
    return "nothing was raised"


def refused(rank: int, store: Any) -> Any:
    open_world(rank, store, WORLD)
    params = list(model().parameters())
    adamw, alone = torch.optim.AdamW, dist.new_group([0])

    def given(*args: Any, **kwargs: Any) -> Callable[[], Any]:
        return lambda: ReplicaOptimizer(params, *args, **kwargs)

    made = ReplicaOptimizer(model().parameters(), adamw)
    sparse = torch.sparse_coo_tensor(size=(2, 3), check_invariants=True)  # type: ignore[call-arg]
    wrong: dict[str, Callable[[], Any]] = {
        "replicas=3 does not divide world_size=4": given(adamw, replicas=3),
        "cannot shard LBFGS: ": given(torch.optim.LBFGS),
        "cannot shard SparseAdam: it needs sparse gradients": given(torch.optim.SparseAdam),
        "set partition='parameter' (of the strategy or of `ReplicaOptimizer`)": given(torch.optim.Adafactor),
        "must be a class of torch.optim, such as torch.optim.AdamW": given(adamw(params)),
        "partition='row' must be one of 'element', 'parameter'": given(adamw, partition="row"),
        "overlap_with_ddp=True: DDP's hooks make no updates here. Register no `hook_": given(
            adamw, overlap_with_ddp=True
        ),
        "parameters_as_bucket_view=True: parameters are always": given(adamw, parameters_as_bucket_view=True),
        "broadcast_fp16=True: parameters are gathered in their own dtype": given(adamw, broadcast_fp16=True),
        "broadcast_buffer_size=0: parameters are sent from where they": given(adamw, broadcast_buffer_size=0),
        "force_broadcast_object=True: the state of": given(adamw, force_broadcast_object=True),
        "group=None: the ranks are `process_group=`": given(adamw, group=None),
        "process_group='all' must be a process group, as": given(adamw, process_group="all"),
        "has layout torch.sparse_coo, but parameters live in flat": lambda: ReplicaOptimizer([sparse], adamw),
        "(2, 3) has layout torch.sparse_coo": lambda: made.add_param_group({"params": [sparse]}),
        "to=4 must be one of 0, 1, 2, 3": lambda: made.consolidate_state_dict(to=4),
        f"Rank {rank} does not have the whole state. Call `consolidate_state_dict(to={rank})` on all": made.state_dict,
    }
    if rank:
        wrong[f"Rank {rank} is not in the process group. Make"] = given(adamw, process_group=alone)
    said = {start: message_of(make) for start, make in wrong.items()}
    return [f"{message!r} does not contain {start!r}" for start, message in said.items() if start not in message]


def test_what_is_refused() -> None:
    assert run_ranks(WORLD, refused) == [[]] * WORLD


def test_without_any_process_group() -> None:
    with pytest.raises(ConfigurationError, match=r"call `torch.distributed.init_process_group` before"):
        ReplicaOptimizer(model().parameters(), torch.optim.AdamW)


def fresh(rank: int, store: Any, dtype: str) -> Any:
    """Rank 0 has other weights, as a new process has, and takes the shard of its peer."""
    open_world(rank, store, WORLD)
    net = model().to(getattr(torch, dtype))
    ours = ReplicaOptimizer(net.parameters(), torch.optim.AdamW, replicas=2, lr=1e-2)
    for step in range(3):
        for parameter in net.parameters():
            parameter.grad = torch.full_like(parameter, step - 1.5)
        ours.step()
    if rank in (0, 2):
        manifest, tensors = ours.export_shard()
        if rank == 0:
            for parameter in net.parameters():
                parameter.data.zero_()
            ours.optim.state.clear()

            def receive(tensor: torch.Tensor) -> None:
                dist.recv(tensor, 2)

            ours.import_shard(manifest, receive)
        else:
            for tensor in tensors:
                dist.send(tensor.contiguous(), 0)
    for parameter in net.parameters():
        parameter.grad = torch.ones_like(parameter)
    ours.step()
    return [[p.tolist() for p in net.parameters()], ours.shard_digest()]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_shard_goes_to_a_new_process(dtype: str) -> None:
    results = run_ranks(WORLD, fresh, dtype)
    assert all(weights == results[0][0] for weights, _ in results)
    assert [each for _, each in results[:2]] == [each for _, each in results[2:]]


def written(rank: int, store: Any, shared_memory: bool) -> Any:
    """User code writes to the parameters between two steps, at once or later, on each rank."""
    open_world(rank, store, WORLD)
    net, whole = model(), model()
    ours = ReplicaOptimizer(net.parameters(), torch.optim.SGD, replicas=2, shared_memory=shared_memory, lr=0.5)
    plain = torch.optim.SGD(whole.parameters(), lr=0.5)
    for step in range(20):
        for each, optimizer in ((net, ours), (whole, plain)):
            for parameter in each.parameters():
                parameter.grad = torch.full_like(parameter, 0.01 * (step - 3))
            optimizer.step()
            if step % 4 == rank:
                time.sleep(0.002)
            with torch.no_grad():
                for parameter in each.parameters():
                    parameter.mul_(0.9)
    return all(map(torch.equal, net.parameters(), whole.parameters()))


@pytest.mark.parametrize("shared_memory", [True, False])
def test_weights_that_user_code_writes(shared_memory: bool) -> None:
    assert run_ranks(WORLD, written, shared_memory) == [True] * WORLD


def gradients_that_differ(rank: int, store: Any) -> Any:
    """Nobody averages, and one rank clips."""
    open_world(rank, store, WORLD)
    net = model()
    ours = ReplicaOptimizer(net.parameters(), torch.optim.AdamW, lr=1e-2)
    said = []
    for other in (None, 3):
        net(batch(0, 0)).square().mean().backward()
        if rank == other:
            nn.utils.clip_grad_norm_(net.parameters(), 1e-3)
        ours.step()
        try:
            ours.consolidate_state_dict()
            said.append("")
        except CorruptedShardError as error:
            said.append(str(error))
    return said


def test_gradients_that_differ_are_told_before_a_checkpoint() -> None:
    for alike, differ in run_ranks(WORLD, gradients_that_differ):
        assert alike == ""
        assert "Ranks 1, 3 hold the same shard, but not with the same bits. Gradients must be the same" in differ
