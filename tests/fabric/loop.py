"""A training loop under Fabric, for any strategy; DDP with the plain optimizer is the oracle."""

import os
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from lightning.fabric import Fabric
from lightning.fabric.plugins import MixedPrecision
from torch import Tensor, nn

from lightning_replica import FabricStrategy
from tests.support.ranks import open_world


class Net(nn.Module):
    """Has buffers, which DDP sends before forward, random numbers, tied weights, a frozen and an unused parameter."""

    def __init__(self, sparse: bool = False, unused: bool = False) -> None:
        super().__init__()
        self.first = nn.Embedding(16, 5, sparse=sparse)
        wide, tied = nn.Linear(5, 33), nn.Linear(33, 7)
        self.layers = nn.Sequential(wide, nn.BatchNorm1d(33), nn.Dropout(0.2), tied, nn.Tanh())
        self.again, self.frozen, self.last = nn.Linear(33, 7), nn.Linear(7, 7).requires_grad_(False), nn.Linear(7, 1)
        self.again.weight = tied.weight
        self.unused = unused
        self.extra = nn.Linear(7, 1) if unused else nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.layers[:3](self.first(x))
        return self.last(self.frozen(self.layers[3:](hidden) + self.again(hidden)))


@dataclass(frozen=True)
class Case:
    """One way to train."""

    optimizer: Callable[..., Any] = torch.optim.AdamW
    options: dict[str, Any] = field(default_factory=lambda: {"lr": 1e-2, "weight_decay": 0.1})
    groups: bool = False
    accumulate: int = 1
    clip: dict[str, Any] = field(default_factory=dict)
    schedule: str = ""
    closure: bool = False
    precision: Any = None
    scaled: bool = False
    sparse: bool = False
    unused: bool = False
    strategy: dict[str, Any] = field(default_factory=dict)


def launch(rank: int, world: int, strategy: Any, case: Case = Case()) -> Fabric:
    """Fabric in a rank whose process group is open."""
    os.environ.update(LOCAL_RANK=str(rank), WORLD_SIZE=str(world), MASTER_ADDR="127.0.0.1", MASTER_PORT="1")
    plugins = None
    if case.scaled:
        plugins = MixedPrecision("16-mixed", "cpu", torch.amp.GradScaler("cpu", init_scale=2.0**14, growth_interval=2))
    fabric = Fabric(accelerator="cpu", devices=world, strategy=strategy, precision=case.precision, plugins=plugins)
    fabric.launch()
    return fabric


def batch(rank: int, step: int) -> Tensor:
    return torch.randint(16, (4,), generator=torch.Generator().manual_seed(100 * step + rank))


class Training:
    """A model and its optimizer, set up."""

    def __init__(self, fabric: Fabric, case: Case) -> None:
        torch.manual_seed(0)
        net = Net(case.sparse, case.unused)
        trained = list(net.parameters())
        params: Any = [{"params": trained[:3], "lr": 1e-3}, {"params": trained[3:]}] if case.groups else trained
        optimizer = case.optimizer(params, **case.options)
        self.fabric, self.case = fabric, case
        self.schedule = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.7) if case.schedule == "before" else None
        self.model, self.optimizer = fabric.setup(net, optimizer)
        if case.schedule == "after":
            self.schedule = torch.optim.lr_scheduler.StepLR(self.optimizer, 1, 0.7)

    def run(self, steps: range) -> None:
        for step in steps:
            self.optimizer.zero_grad()
            if self.case.closure:
                self.optimizer.step(lambda step=step: self.backward(step))
            else:
                self.backward(step)
                if self.case.clip:
                    self.fabric.clip_gradients(self.model, self.optimizer, **self.case.clip)
                self.optimizer.step()
            if self.schedule is not None:
                self.schedule.step()

    def backward(self, step: int) -> Any:
        loss = torch.zeros(())
        for number in range(self.case.accumulate):
            last = number == self.case.accumulate - 1
            torch.manual_seed(1000 * step + 10 * number + self.fabric.global_rank)
            with nullcontext() if last else self.fabric.no_backward_sync(self.model):
                loss = self.model(batch(self.fabric.global_rank, 10 * step + number)).square().mean()
                self.fabric.backward(loss)
        return loss.detach()

    def outcome(self) -> Any:
        """Weights and buffers; on rank 0 also the optimizer's state as the plain one has it."""
        state = self.optimizer.state_dict()
        plain = {
            position: {key: torch.as_tensor(value).tolist() for key, value in entries.items()}
            for position, entries in state.get("state", {}).items()
        }
        weights = {key: value.tolist() for key, value in self.model.state_dict().items()}
        rates = [group["lr"] for group in self.optimizer.param_groups]
        return {"weights": weights, "state": plain if self.fabric.global_rank == 0 else None, "rates": rates}


def compare(rank: int, store: Any, world: int, replicas: int, cases: dict[str, Case]) -> dict[str, Any]:
    """Names the cases in which the two differ."""
    open_world(rank, store, world)
    differ = {}
    for name, case in cases.items():
        found = []
        for kind in ("ddp", "replica_zero"):
            made: Any = FabricStrategy(replicas=replicas, **case.strategy, find_unused_parameters=case.unused)
            if kind == "ddp":
                made = "ddp_find_unused_parameters_true" if case.unused else "ddp"
            training = Training(launch(rank, world, made, case), case)
            training.run(range(4))
            found.append(training.outcome())
        if found[0] != found[1]:
            differ[name] = [key for key in found[0] if found[0][key] != found[1][key]]
    return differ


def file_of(folder: str) -> Path:
    return Path(folder) / "checkpoint.pt"
