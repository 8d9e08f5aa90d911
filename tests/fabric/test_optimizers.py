"""The user's optimizer stays the object that updates; what cannot be sharded is refused."""

from typing import Any

import pytest
import torch
from lightning.fabric import Fabric
from torch import nn

from lightning_replica import FabricStrategy, ReplicaOptimizer
from lightning_replica.errors import ConfigurationError
from tests.fabric.loop import batch, launch
from tests.support.ranks import open_world, run_ranks

WORLD = 4


def model() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Embedding(16, 5), nn.Linear(5, 7), nn.Linear(7, 1))


def step(fabric: Fabric, net: Any, optimizer: Any, number: int) -> None:
    optimizer.zero_grad()
    fabric.backward(net(batch(fabric.global_rank, number)).square().mean())
    optimizer.step()


def kept(rank: int, store: Any) -> Any:
    """Hooks are called, state that it has goes on, and a group that is added is trained, as under DDP."""
    open_world(rank, store, WORLD)
    results = []
    for strategy in ("ddp", FabricStrategy(replicas=2)):
        fabric = launch(rank, WORLD, strategy)
        net = model()
        mine = torch.optim.AdamW(net[:2].parameters(), lr=1e-2)
        called: list[str] = []
        net(batch(0, 0)).mean().backward()  # the same on all ranks
        mine.step()
        mine.register_step_post_hook(lambda *_, called=called: called.append("before"))
        wrapped, optimizer = fabric.setup(net, mine)
        optimizer.register_step_post_hook(lambda *_, called=called: called.append("after"))
        for number in range(4):
            if number == 2:
                optimizer.add_param_group({"params": list(net[2].parameters()), "lr": 1e-3})
            step(fabric, wrapped, optimizer, number)
        state = optimizer.state_dict()
        optimizer.load_state_dict(fabric.broadcast(state))
        step(fabric, wrapped, optimizer, 5)
        state = optimizer.state_dict()
        steps = [int(each["step"]) for each in state["state"].values()] if rank == 0 else []
        weights = [p.tolist() for p in net.parameters()]
        rates = [group["lr"] for group in optimizer.param_groups]
        results.append([weights, steps, rates, sorted(called), mine.param_groups is optimizer.param_groups])
    return [ours == ddp for ddp, ours in zip(*results, strict=True)]


def test_it_stays_what_it_is() -> None:
    assert run_ranks(WORLD, kept) == [[True] * 5] * WORLD


def compiled(rank: int, store: Any) -> Any:
    """The wrapper of DDP is under the compiled module, as Fabric has it."""
    open_world(rank, store, 2)
    results = []
    for strategy in ("ddp", "replica_zero"):
        fabric, net = launch(rank, 2, strategy), model()
        optimizer = torch.optim.AdamW(net.parameters(), lr=1e-2)
        made: Any = torch.compile(net, backend="eager")
        wrapped, optimizer = fabric.setup(made, optimizer)
        for number in range(3):
            step(fabric, wrapped, optimizer, number)
        results.append([p.tolist() for p in net.parameters()])
    return results[0] == results[1]


def test_a_compiled_model() -> None:
    assert run_ranks(2, compiled) == [True] * 2


def sharded(rank: int, store: Any) -> Any:
    open_world(rank, store, WORLD)
    fabric = launch(rank, WORLD, "replica_zero")
    net = model()
    mine = torch.optim.AdamW(net.parameters(), lr=1e-2)
    wrapped, optimizer = fabric.setup(net, mine)
    step(fabric, wrapped, optimizer, 0)
    own = optimizer.optimizer
    wrapped(batch(rank, 1)).square().mean().backward()  # a plain one, as under DDP
    optimizer.step()
    again: Any = fabric.setup_optimizers(ReplicaOptimizer(model().parameters(), torch.optim.SGD, lr=0.1))
    numel = sum(tensor.numel() for tensor in own.export_shard()[1]) / sum(p.numel() for p in net.parameters())
    return [own.optim is mine, own.peers, round(numel), isinstance(again.optimizer, ReplicaOptimizer)]


def test_each_rank_holds_a_shard() -> None:
    """Values and two moments of half of the elements; one step each, and gaps."""
    assert run_ranks(WORLD, sharded) == [[True, [rank % 2, rank % 2 + 2], 2, True] for rank in range(WORLD)]


def refused(rank: int, store: Any) -> Any:
    open_world(rank, store, WORLD)
    said = []
    fabric = launch(rank, WORLD, "replica_zero")

    def other_state(net: nn.Module) -> Any:
        net(batch(rank, 0)).mean().backward()
        optimizer = torch.optim.AdamW(net.parameters())
        optimizer.step()
        return optimizer

    for make in (
        other_state,
        lambda net: torch.optim.LBFGS(net.parameters()),
        lambda net: torch.optim.SparseAdam(list(net.parameters())),
        lambda net: torch.optim.Adafactor(net.parameters()),
        lambda net: torch.optim.SGD([nn.Parameter(torch.empty(3, device="meta"))]),
    ):
        net = model()
        try:
            fabric.setup(net, make(net))
        except ConfigurationError as error:
            said.append(str(error))
    try:
        launch(rank, WORLD, FabricStrategy(replicas=3))
    except ConfigurationError as error:
        said.append(str(error))
    return said


def test_what_cannot_be_sharded() -> None:
    for found in run_ranks(WORLD, refused):
        state, lbfgs, sparse, adafactor, meta, replicas = found
        assert "has state already, and not the same on each" in state
        assert "cannot shard LBFGS" in lbfgs
        assert "cannot shard SparseAdam" in sparse
        assert "set partition='parameter' (of the strategy or of `ReplicaOptimizer`)" in adafactor
        assert "are on meta, but this rank trains on cpu. Set up their model first" in meta
        assert "replicas=3 does not divide world_size=4" in replicas


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"replicas": 0}, "replicas=0 must be a whole number"),
        ({"replicas": "2"}, "replicas='2' must be a whole number"),
        ({"timeout_s": 0}, "timeout_s=0 must be a number of seconds"),
        ({"partition": "layer"}, "partition='layer' must be one of 'element', 'parameter'"),
        ({"shared_memory": None}, "shared_memory=None must be one of True, False"),
        ({"start_method": "ssh"}, "start_method='ssh' must be one of 'popen'"),
    ],
)
def test_values_that_make_no_sense(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigurationError, match=message):
        FabricStrategy(**options)


def test_misspelt() -> None:
    with pytest.raises(TypeError, match="replcas"):
        FabricStrategy(replcas=2)  # type: ignore[call-arg]


def test_three_ranks_cannot_hold_two_copies() -> None:
    with pytest.raises(ConfigurationError, match="replicas=2 does not divide world_size=3"):
        Fabric(strategy="replica_zero", accelerator="cpu", devices=3)


def test_a_launcher_that_replaces_single_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {"STORE": "127.0.0.1:1/run", "SUPERVISOR": "1", "GENERATION": "0", "WORLD_SIZE": "2"}.items():
        monkeypatch.setenv(f"LIGHTNING_REPLICA_{name}", value)
    with pytest.raises(ConfigurationError, match="a loop under Fabric cannot take one in. Start the script with"):
        Fabric(strategy="replica_zero", accelerator="cpu", devices=2)
