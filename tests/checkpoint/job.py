"""Small sharded trainings, saved and loaded, and their state in a form that does not depend on the world."""

import warnings
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
from torch import Tensor, nn

from lightning_replica.checkpoint.location import Location, locate
from lightning_replica.checkpoint.named_model import NamedModel
from lightning_replica.checkpoint.sharded import load_sharded, save_sharded, untrained_tensors_of
from lightning_replica.core.grid import Grid
from lightning_replica.groups.membership import make_groups
from lightning_replica.sharding.piece import is_like
from tests.support.ranks import open_world
from tests.support.sharded import apply, new_state

PLAIN = {"epoch": 3, "callbacks": {"best": torch.tensor(0.5), "names": ["a", "b"]}}


class Net(nn.Module):
    """Of every kind of parameter and buffer that there is."""

    def __init__(self, memory_format: torch.memory_format = torch.contiguous_format) -> None:
        super().__init__()
        torch.manual_seed(0)
        conv = nn.Conv2d(3, 5, 3, bias=False)  # noise before BatchNorm
        self.conv = conv.to(memory_format=memory_format)  # type: ignore[call-overload]
        self.norm = nn.BatchNorm2d(5)
        self.first, self.second = nn.Linear(20, 7), nn.Linear(7, 20)
        self.tied = nn.Linear(7, 20, bias=False)
        self.tied.weight = self.second.weight
        self.frozen = nn.Parameter(torch.randn(3, 2), requires_grad=False)
        self.unused = nn.Parameter(torch.randn(4))
        self.empty = nn.Parameter(torch.zeros(0))
        self.scale = nn.Parameter(torch.tensor(0.7))

    def forward(self, images: Tensor) -> Tensor:
        seen = self.norm(self.conv(images)).flatten(1)  # (batch, 20)
        hidden = torch.tanh(self.first(seen))
        return (self.second(hidden) + self.tied(hidden)) * self.scale + self.frozen.sum() + self.empty.sum()


Optimizers = Callable[[Net], list[torch.optim.Optimizer]]


def _groups(net: Net) -> list[dict[str, Any]]:
    parameters = list(net.parameters())
    return [{"params": parameters[::2]}, {"params": parameters[1::2], "lr": 3e-2, "weight_decay": 0.1}]


def _two(net: Net) -> list[torch.optim.Optimizer]:
    conv = [*net.conv.parameters(), *net.norm.parameters()]
    mine = {id(p) for p in conv}
    others = [p for p in net.parameters() if id(p) not in mine]
    return [torch.optim.AdamW(conv, lr=1e-2), torch.optim.SGD(others, lr=1e-2, momentum=0.9)]


@dataclass(frozen=True)
class Case:
    """What is trained."""

    optimizers: Optimizers
    dtype: torch.dtype = torch.float32
    partitions: tuple[str, ...] = ("element", "parameter")


CASES = {
    "AdamW": Case(lambda net: [torch.optim.AdamW(_groups(net), lr=1e-2, amsgrad=True)]),
    "SGD": Case(lambda net: [torch.optim.SGD(_groups(net), lr=1e-2, momentum=0.9)]),
    "Adagrad": Case(lambda net: [torch.optim.Adagrad(_groups(net), lr=1e-2)]),
    "NAdam": Case(lambda net: [torch.optim.NAdam(_groups(net), lr=1e-2)]),
    "two": Case(_two),
    "bf16": Case(lambda net: [torch.optim.AdamW(_groups(net), lr=1e-2)], torch.bfloat16),
    "Adafactor": Case(lambda net: [torch.optim.Adafactor(_groups(net), lr=1e-2)], partitions=("parameter",)),
}


class Run:
    """One rank of a training."""

    def __init__(
        self,
        case: str,
        rank: int,
        grid: Grid,
        partition: str,
        fresh: bool = False,
        net: Any = None,
        bucket_bytes: int = 400,
    ) -> None:
        self.case, self.rank = CASES[case], rank
        self.net = (net or Net()).to(self.case.dtype)
        self.names = [name for name, _ in self.net.named_parameters()]
        optimizers = self.case.optimizers(self.net)
        options = {"bucket_bytes": bucket_bytes, "partition": partition}
        self.state = new_state(grid, rank, self.net.parameters(), optimizers, **options)
        if fresh:  # whatever is not loaded shows
            for tensor in [*self.net.parameters(), *self.net.buffers()]:
                tensor.detach().fill_(7)
            for optimizer in optimizers:
                for group in optimizer.param_groups:
                    group["lr"] = 7.0

    def train(self, steps: int) -> None:
        for _ in range(steps):
            self.state.begin_window(True)
            torch.manual_seed(100 * self.state.step + self.rank)
            for sharded in self.state.optimizers:
                sharded.optimizer.zero_grad()
            self.state.before_backward(reduce=True)
            self.net(torch.randn(6, 3, 4, 4, dtype=self.case.dtype)).square().mean().backward()
            apply(self.state)
            for sharded in self.state.optimizers:  # as a scheduler would
                sharded.optimizer.param_groups[-1]["lr"] *= 0.5
            for buffer in self.net.buffers():  # as DDP does
                torch.distributed.broadcast(buffer, 0)

    def save(self, path: Location, **more: Any) -> None:
        save_sharded(path, self.state, self.named(), PLAIN, **more)

    def load(self, path: Location) -> None:
        load_sharded(path, self.state, self.named())

    def named(self) -> NamedModel:
        return NamedModel(self.names, *untrained_tensors_of(self.net, self.state))

    def facts(self) -> dict[str, Any]:
        """Everything, as bytes in the order of memory: whole where each rank has it, pieces by where they begin."""
        order = [name for name in self.net.state_dict() if "num_batches" not in name]
        facts: dict[str, Any] = {name: _hex(self.net.state_dict()[name]) for name in order}
        assert self.net.norm.num_batches_tracked is not None
        facts["batches"] = int(self.net.norm.num_batches_tracked)
        pieces: dict[str, dict[str, Any]] = {}
        for number, sharded in enumerate(self.state.optimizers):
            groups = sharded.optimizer.param_groups
            facts[f"groups {number}"] = [{k: v for k, v in group.items() if k != "params"} for group in groups]
            for piece in sharded.pieces:
                name, start = self.names[piece.buffers.order[piece.where.parameter]], piece.where.param.start
                entries = {"main": piece.parameter, **sharded.optimizer.state.get(piece.parameter, {})}
                for key, value in entries.items():
                    like = is_like(key, value, piece.parameter)
                    place = str(start) if like else "whole"
                    told = _hex(value) if isinstance(value, Tensor) else value
                    pieces.setdefault(f"{number} {name} {key}", {})[place] = told
        return {"facts": facts, "pieces": pieces}

    def close(self) -> None:
        self.state.release()


def _hex(tensor: Tensor) -> str:
    tensor = tensor.detach()
    return (
        tensor.as_strided((tensor.numel(),), (1,), tensor.storage_offset())
        .contiguous()
        .view(torch.uint8)
        .numpy()
        .tobytes()
        .hex()
    )


def assemble(results: list[dict[str, Any]]) -> dict[str, Any]:
    """The state of the world from that of its ranks, which must agree wherever they hold the same."""
    for result in results:
        assert "facts" in result, result.get("raised", result)
    found: dict[str, Any] = dict(results[0]["facts"])
    merged: dict[str, dict[str, Any]] = {}
    for result in results:
        assert result["facts"] == results[0]["facts"]
        for name, pieces in result["pieces"].items():
            for start, value in pieces.items():
                assert merged.setdefault(name, {}).setdefault(start, value) == value, name
    for name, pieces in merged.items():
        found[name] = pieces["whole"] if "whole" in pieces else "".join(pieces[k] for k in sorted(pieces, key=int))
    return found


class World:
    """One rank of N, with the groups of every R."""

    def __init__(self, rank: int, store: Any, world_size: int) -> None:
        warnings.simplefilter("error")
        open_world(rank, store, world_size)
        self.rank, self.size = rank, world_size
        self._groups: dict[int, Any] = {}

    def run(self, case: str, replicas: int, partition: str, **more: Any) -> Run:
        grid = Grid.of(self.size, replicas)
        if replicas not in self._groups:
            self._groups[replicas] = make_groups(grid, self.rank, timedelta(seconds=60))
        run = Run(case, self.rank, grid, partition, **more)
        run.state.connect(self._groups[replicas], lambda: None)
        return run


def save_all(rank: int, store: Any, world_size: int, wanted: list[list[Any]], root: str) -> dict[str, Any]:
    """Trains each of ``wanted`` (case, replicas, partition) for two steps, saves it, and trains one more."""
    world = World(rank, store, world_size)
    results = {}
    for case, replicas, partition in wanted:
        run = world.run(case, replicas, partition)
        run.train(2)
        name = f"{case}-{world_size}-{replicas}-{partition}"
        run.save(locate(root) / name)
        saved = run.facts()
        run.train(1)
        results[name] = {"saved": saved, "after": run.facts()}
        run.close()
    return results


def load_all(rank: int, store: Any, world_size: int, wanted: list[list[Any]], root: str) -> dict[str, Any]:
    """Loads each of ``wanted`` (directory, replicas, partition), and trains one more step."""
    world = World(rank, store, world_size)
    results = {}
    for name, replicas, partition in wanted:
        run = world.run(name.split("-")[0], replicas, partition, fresh=True)
        run.load(locate(root) / name)
        run.state.step = 2
        loaded = run.facts()
        run.train(1)
        results[f"{name} {replicas} {partition}"] = {"saved": loaded, "after": run.facts()}
        run.close()
    return results
