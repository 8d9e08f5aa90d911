"""Modules with one kind of state each: ``python -m tests.state.kinds`` goes back, and takes a rank's place.

It prints a line of JSON for each: what the state was, what it was after a recovery, and what a further change makes of
both.
"""

import contextlib
import contextvars
import functools
import itertools
import json
import logging
import multiprocessing
import operator
import os
import random
import sys
from collections import defaultdict, deque
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import lightning as L
import numpy as np
import torch
from lightning.fabric.utilities.throughput import Throughput
from lightning.pytorch.callbacks import EarlyStopping
from lightning.pytorch.loggers import CSVLogger
from torch import Tensor, nn
from torch.distributed.algorithms.model_averaging.averagers import PeriodicModelAverager
from torch.optim.lr_scheduler import CyclicLR, ExponentialLR, LRScheduler
from torch.quasirandom import SobolEngine
from torch.utils.data import DataLoader, TensorDataset
from torchmetrics import MeanMetric

from lightning_replica import ReplicaZeroStrategy
from tests.state import settings_of_kinds

STEP = 3


class Kind(L.LightningModule):
    """Trains a line; `change` is what each step does to the state."""

    loader_class: type[DataLoader[Any]] = DataLoader

    def __init__(self) -> None:
        super().__init__()
        self.line = nn.Linear(2, 1)
        self.changes = 0

    def training_step(self, batch: list[Tensor], _: int) -> Tensor:
        self.turn()
        return self.line(batch[0]).square().mean()

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.line.parameters(), lr=0.1)

    def turn(self) -> None:
        """Count a change, and make it."""
        self.changes += 1
        self.change()

    def change(self) -> None:
        """Change the state."""

    def look(self) -> Any:
        """Return the state, as plain data."""


class ActiveHead(Kind):
    def __init__(self) -> None:
        super().__init__()
        self.heads = nn.ModuleList([nn.Linear(1, 1), nn.Linear(1, 1)])
        self.active = self.heads[0]

    def change(self) -> None:
        self.active = self.heads[self.changes % 2]

    def look(self) -> Any:
        return [self.active is head for head in self.heads]


class LazyBuffer(Kind):
    def __init__(self) -> None:
        super().__init__()
        self.center: Tensor | None
        self.register_buffer("center", None)

    def change(self) -> None:
        if self.changes > STEP:
            self.center = torch.ones(2) if self.center is None else self.center * 0.5

    def look(self) -> Any:
        return None if self.center is None else self.center.tolist()


class OneBufferTwice(Kind):
    def __init__(self) -> None:
        super().__init__()
        self.current: Tensor
        self.best: Tensor
        self.register_buffer("current", torch.zeros(1))
        self.register_buffer("best", torch.zeros(1))

    def change(self) -> None:
        self.current = self.current + 1
        if self.changes % 2:
            self.best = self.current

    def look(self) -> Any:
        return [self.current.item(), self.best.item(), self.best is self.current]


class FrozenReplaced(Kind):
    def __init__(self) -> None:
        super().__init__()
        self.prototypes = nn.Parameter(torch.zeros(1), requires_grad=False)

    def change(self) -> None:
        self.prototypes = nn.Parameter(self.prototypes + 1, requires_grad=False)

    def look(self) -> Any:
        return self.prototypes.item()


class SwapFrozen(Kind):
    """Two frozen parameters exchange their names."""

    def __init__(self) -> None:
        super().__init__()
        self.one = nn.Parameter(torch.zeros(1), requires_grad=False)
        self.other = nn.Parameter(torch.full((1,), 100.0), requires_grad=False)

    def change(self) -> None:
        self.one.data += 1
        self.one, self.other = self.other, self.one

    def look(self) -> Any:
        return [self.one.item(), self.other.item()]


class HalfTeacher(Kind):
    """A frozen parameter that gets another dtype, and one that gets another size."""

    def __init__(self) -> None:
        super().__init__()
        self.teacher, self.bank = nn.Linear(2, 1).requires_grad_(False), nn.Parameter(torch.zeros(1), False)

    def change(self) -> None:
        if self.changes == 2:
            self.teacher.bfloat16()
        self.teacher.weight.data += 1
        self.bank.data = torch.full((self.changes,), float(self.changes))

    def look(self) -> Any:
        return [str(self.teacher.weight.dtype), self.teacher.weight.tolist(), self.bank.tolist()]


class Codebook(Kind):
    """A rank writes to one of two codes."""

    def __init__(self) -> None:
        super().__init__()
        self.codes = nn.ParameterList(nn.Parameter(torch.zeros(1), requires_grad=False) for _ in range(2))

    def change(self) -> None:
        self.codes[0].data += 1

    def look(self) -> Any:
        return [code.item() for code in self.codes]


class Modes(Kind):
    """Layers in evaluation mode, a parameter that learns no more, a limit of the trainer."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Dropout() for _ in range(8))

    def change(self) -> None:
        self.layers[self.changes].eval()
        self.line.bias.requires_grad = self.changes % 2 == 0
        self.trainer.fit_loop.max_epochs = 100 + self.changes

    def look(self) -> Any:
        return [[layer.training for layer in self.layers], self.line.bias.requires_grad, self.trainer.max_epochs]


class TensorRate(Kind):
    def __init__(self) -> None:
        super().__init__()
        self.rate = torch.tensor(0.5)

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD([{"params": self.line.parameters(), "history": [0]}], lr=self.rate)

    def change(self) -> None:
        self.rate.mul_(0.5)
        self.trainer.optimizers[0].param_groups[0]["history"].append(self.changes)

    def look(self) -> Any:
        group = self.trainer.optimizers[0].param_groups[0]
        return [group["lr"].item(), group["history"]]


class SchedulerConfig(Kind):
    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.SGD(self.line.parameters(), lr=0.1)
        return [optimizer], [{"scheduler": ExponentialLR(optimizer, 0.9), "interval": "step"}]

    def change(self) -> None:
        config = self.trainer.lr_scheduler_configs[0]
        config.frequency += 1
        if self.changes > STEP:
            config.scheduler.warm = getattr(config.scheduler, "warm", 0) + 1  # type: ignore[union-attr]

    def look(self) -> Any:
        config = self.trainer.lr_scheduler_configs[0]
        return [config.frequency, getattr(config.scheduler, "warm", None)]


class TrainerAttributes(Kind):
    def change(self) -> None:
        trainer: Any = self.trainer
        trainer.log_every_n_steps += 1
        trainer.fit_loop.epoch_loop.max_steps += 1
        trainer.fit_loop.min_epochs = -self.changes
        trainer.gradient_clip_algorithm = ("norm", "value")[self.changes % 2]
        trainer.reload_dataloaders_every_n_epochs = self.changes

    def look(self) -> Any:
        trainer: Any = self.trainer
        steps = [trainer.log_every_n_steps, trainer.max_steps, trainer.min_epochs]
        return [*steps, trainer.gradient_clip_algorithm, trainer.reload_dataloaders_every_n_epochs]


class Vocabulary(Kind):
    def __init__(self) -> None:
        super().__init__()
        self.ids: dict[str, int] = defaultdict(itertools.count().__next__)

    def change(self) -> None:
        self.ids[f"word {self.changes}"]

    def look(self) -> Any:
        return dict(self.ids)


class Drawn(Kind):
    def __init__(self) -> None:
        super().__init__()
        self.draw = SobolEngine(1, scramble=True, seed=1).draw
        self.drawn = 0.0

    def change(self) -> None:
        self.drawn = self.draw().item()

    def look(self) -> Any:
        return self.drawn


class Ring(deque[int]):
    __slots__ = ("place",)
    place: int


class Pair(tuple[int, ...]):
    hits: int


class Attributed(Kind):
    """Attributes of containers, functions and tensors of the user's classes."""

    def __init__(self) -> None:
        super().__init__()
        self.ring, self.pair, self.partial = Ring(maxlen=2), Pair((1, 2)), functools.partial(max, 0)
        self.weight = _Weight(torch.zeros(1), requires_grad=False)
        for each in self._all():
            each.hits = 0
        self.ring.place = 0

    def _all(self) -> list[Any]:
        return [self.pair, self.partial, self.weight]

    def change(self) -> None:
        for each in self._all():
            each.hits += 1
        self.ring.append(self.changes)
        self.ring.place += 1

    def look(self) -> Any:
        return [*(each.hits for each in self._all()), self.ring.place, *self.ring]


class _Weight(nn.Parameter):
    hits: int


class Memory(Kind):
    def __init__(self) -> None:
        super().__init__()
        self.before, self.now = torch.zeros(1), torch.zeros(1)

    def change(self) -> None:
        self.before.data = self.now.data
        self.now = self.now + 1

    def look(self) -> Any:
        return [self.before.item(), self.now.item()]


class SharedMemory(Kind):
    """One tensor gets the memory of another that holds the same: its content does not show it."""

    def __init__(self) -> None:
        super().__init__()
        self.shown, self.kept = torch.zeros(1), torch.zeros(1)

    def change(self) -> None:
        if self.changes == 2:
            self.shown.data = self.kept.data
        if self.changes > STEP:
            self.kept.add_(1)

    def look(self) -> Any:
        return [self.shown.item(), self.kept.item()]


class Cold:
    pass


class Warm(Cold):
    pass


class ClassOfAnObject(Kind):
    def __init__(self) -> None:
        super().__init__()
        self.state = Cold()

    def change(self) -> None:
        if self.changes > STEP:
            self.state.__class__ = Warm

    def look(self) -> Any:
        return type(self.state).__name__


class OwnLoader(Kind):
    def __init__(self) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(3)
        self.loader: Any = DataLoader(TensorDataset(torch.arange(8)), batch_size=8, shuffle=True, generator=generator)
        self.drawn: list[int] = []

    def change(self) -> None:
        self.drawn = next(iter(self.loader))[0].tolist()

    def look(self) -> Any:
        return self.drawn


class _Levels(DataLoader[Any]):
    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.levels = [0]


class LoaderWithAttributes(Kind):
    loader_class = _Levels

    def change(self) -> None:
        loader: Any = self.trainer.train_dataloader
        loader.levels.append(self.changes)

    def look(self) -> Any:
        loader: Any = self.trainer.train_dataloader
        return loader.levels


LOSS: Any = torch.tanh


class Globals(Kind):
    loss_class: Any = nn.MSELoss

    def change(self) -> None:
        global LOSS
        if self.changes > STEP:
            LOSS, type(self).loss_class = torch.sigmoid, nn.L1Loss

    def look(self) -> Any:
        return [LOSS.__name__, self.loss_class.__name__]


class Row(Kind):
    """It is told: a row of a structured array is a part of C that says nothing of its content."""

    def __init__(self) -> None:
        super().__init__()
        self.row: Any = np.zeros(1, dtype=[("count", "i8")])[0].copy()

    def change(self) -> None:
        self.row["count"] += 1

    def look(self) -> Any:
        return int(self.row["count"])


class _Follows(LRScheduler):
    """A scheduler that reads, and writes to, what the module has."""

    def __init__(self, optimizer: Any, module: "SchedulerOfTheModule") -> None:
        self.module, self.meter = module, module.meter
        super().__init__(optimizer)

    def get_lr(self) -> list[Any]:
        return [base / (1 + self.meter[0]) for base in self.base_lrs]


class SchedulerOfTheModule(Kind):
    def __init__(self) -> None:
        super().__init__()
        self.meter = [0]

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.SGD(self.line.parameters(), lr=0.1)
        return [optimizer], [{"scheduler": _Follows(optimizer, self), "interval": "step"}]

    def change(self) -> None:
        self.meter[0] += 1

    def look(self) -> Any:
        scheduler: Any = self.trainer.lr_scheduler_configs[0].scheduler
        return [scheduler.module is self, scheduler.meter is self.meter, self.meter, scheduler.last_epoch]


class _Keeps(L.Callback):
    """A callback whose state refers to the module."""

    def __init__(self, module: "CallbackOfTheModule") -> None:
        self.module, self.seen = module, module.seen

    def state_dict(self) -> dict[str, Any]:
        return {"module": self.module, "seen": self.seen}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.module, self.seen = state_dict["module"], state_dict["seen"]


class CallbackOfTheModule(Kind):
    def __init__(self) -> None:
        super().__init__()
        self.seen = [0]
        self.keeps = _Keeps(self)

    def configure_callbacks(self) -> list[L.Callback]:
        return [self.keeps]

    def change(self) -> None:
        self.keeps.seen[0] += 1

    def look(self) -> Any:
        return [self.keeps.module is self, self.keeps.seen is self.seen, self.seen]


class _Counting(L.Callback):
    def __init__(self, number: int) -> None:
        self.number = number

    def on_before_zero_grad(self, *_: Any) -> None:
        self.number += 100


class SettingsOfCallbacks(Kind):
    """Settings of Lightning's callbacks."""

    def configure_callbacks(self) -> list[L.Callback]:
        self.stopping = EarlyStopping("loss", patience=1, strict=False)
        return [self.stopping]

    def change(self) -> None:
        self.stopping.patience += 1
        self.stopping.stopping_threshold = float(self.changes)

    def look(self) -> Any:
        return [self.stopping.patience, self.stopping.stopping_threshold]


class OfLightning(Kind):
    """Objects of classes of Lightning's and of torch.distributed's that count."""

    def __init__(self) -> None:
        super().__init__()
        self.throughput = Throughput(window_size=4)
        self.averager = PeriodicModelAverager(2)

    def change(self) -> None:
        self.throughput.update(time=float(self.changes), batches=self.changes, samples=self.changes)
        self.averager.step += 1

    def look(self) -> Any:
        return [[*self.throughput._samples], self.averager.step]


class CallbacksCome(Kind):
    """Callbacks of the user's and of Lightning's join, and the first leaves."""

    def configure_callbacks(self) -> list[L.Callback]:
        return [_Counting(0)]

    def change(self) -> None:
        callbacks: list[L.Callback] = self.trainer.callbacks  # type: ignore[attr-defined]
        if self.changes == 2:
            callbacks[:] = [each for each in callbacks if not isinstance(each, _Counting)]
        callbacks += [_Counting(self.changes), EarlyStopping("loss", patience=self.changes, strict=False)]

    def look(self) -> Any:
        callbacks: list[Any] = self.trainer.callbacks  # type: ignore[attr-defined]
        counts = [each.number for each in callbacks if isinstance(each, _Counting)]
        return [counts, [each.patience for each in callbacks if isinstance(each, EarlyStopping)], len(callbacks)]


class _Draws(random.Random):
    pass


class Dice(Kind):
    def __init__(self) -> None:
        super().__init__()
        self.dice: Any = None
        self.rolled = 0.0

    def change(self) -> None:
        if self.changes == 2:
            self.dice = _Draws(7)
        if self.dice is not None:
            self.rolled = self.dice.random()

    def look(self) -> Any:
        return self.rolled


class TensorHooks(Kind):
    """A tensor that is an attribute gets a hook in training."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = torch.ones(1, requires_grad=True)
        self.seen: list[float] = []

    def change(self) -> None:
        if self.changes > STEP:
            self.scale.register_hook(self._see)
        (self.scale * self.changes).sum().backward()
        self.scale.grad = None

    def _see(self, gradient: Tensor) -> None:
        self.seen.append(gradient.item())

    def look(self) -> Any:
        return list(self.seen)


class _Folder(type(Path())):  # type: ignore[misc]
    count: int


class PathWithAttributes(Kind):
    def __init__(self) -> None:
        super().__init__()
        self.folder = _Folder("x")
        self.folder.count = 0

    def change(self) -> None:
        self.folder.count += 1

    def look(self) -> Any:
        return [str(self.folder), self.folder.count]


class _Rows(np.ndarray):
    __slots__ = ("label",)


class SlotsOfAnArray(Kind):
    def __init__(self) -> None:
        super().__init__()
        rows: Any = np.zeros(2).view(_Rows)
        rows.label = 0
        self.rows: Any = rows

    def change(self) -> None:
        self.rows.label += 1
        self.rows += 1

    def look(self) -> Any:
        return [self.rows.label, self.rows.tolist()]


class Order(Kind):
    """The order of attributes, which code that iterates them sees."""

    def __init__(self) -> None:
        super().__init__()
        self.part = Cold()
        self.part.a, self.part.b = 1, 2  # type: ignore[attr-defined]

    def change(self) -> None:
        first = next(iter(vars(self.part)))
        value = vars(self.part).pop(first)
        setattr(self.part, first, value)

    def look(self) -> Any:
        return list(vars(self.part))


class BytesOfAnArray(Kind):
    """It is told: in a replacement, the two are no longer one."""

    def __init__(self) -> None:
        super().__init__()
        self.memory: Any = bytearray(4)
        self.shown: Any = None

    def change(self) -> None:
        if self.changes == 2:
            self.shown = np.frombuffer(self.memory, dtype=np.uint8)
        self.memory[0] += 1

    def look(self) -> Any:
        return [self.memory[0], None if self.shown is None else self.shown.tolist()]


class Automatic(Kind):
    def change(self) -> None:
        if self.changes > STEP:
            self.automatic_optimization = not self.automatic_optimization

    def look(self) -> Any:
        return self.automatic_optimization


_NOISE = np.random.default_rng(0)


def _augment() -> float:
    return float(_NOISE.random())


class GivenFunction(Kind):
    """A function that the script hands over draws from a generator of its file."""

    def __init__(self) -> None:
        super().__init__()
        self.function, self.drawn = globals()["_augment"], 0.0

    def change(self) -> None:
        self.drawn = self.function()

    def look(self) -> Any:
        return self.drawn


class _Counts:
    def __init__(self) -> None:
        self.calls = 0

    def __call__(self, *_: Any) -> None:
        self.calls += 1


class StateOfHooks(Kind):
    def __init__(self) -> None:
        super().__init__()
        self.line.register_forward_hook(_Counts())
        self.line.weight.register_hook(_Counts())

    def change(self) -> None:
        self.line(torch.ones(1, 2)).sum().backward()

    def look(self) -> Any:
        hooks: Any = [*self.line._forward_hooks.values(), *(self.line.weight._backward_hooks or {}).values()]
        return [hook.calls for hook in hooks]


class ObjectsAsKeys(Kind):
    def __init__(self) -> None:
        super().__init__()
        self.tasks = [Cold(), Cold()]
        self.counts = dict.fromkeys(self.tasks, 0)
        self.by_id = {id(each): 0 for each in self.tasks}
        self.seen = {f"encoder.layers.attention.of.a.long.name.{place}": [Cold()] for place in range(2)}
        self.last: Any = None

    def change(self) -> None:
        for each in self.tasks:
            self.counts[each] += 1
            self.by_id[id(each)] += 1
        self.last = [*self.seen.values()][self.changes % 2]

    def look(self) -> Any:
        counts = [self.counts[each] + self.by_id[id(each)] for each in self.tasks]
        return [counts, [self.last is each for each in self.seen.values()]]


def mse_loss(a: Tensor, b: Tensor) -> Tensor:
    return (a - b).abs().sum()


class FunctionsOfOneName(Kind):
    def __init__(self) -> None:
        super().__init__()
        self.loss: Any = nn.functional.mse_loss

    def change(self) -> None:
        if self.changes == STEP:
            self.loss = mse_loss

    def look(self) -> Any:
        return [self.loss.__module__ == __name__, self.changes]


@dataclass
class _Item:
    number: int = field(default_factory=itertools.count().__next__)


class Defaults(Kind):
    """What methods that Python calls keep: the factory of a field."""

    def __init__(self) -> None:
        super().__init__()
        self.last = 0

    def change(self) -> None:
        self.last = _Item().number

    def look(self) -> Any:
        return self.last


class _Slotted(list[int]):
    __slots__ = ("place",)
    place: int


class _Both(_Slotted):
    note: int


class AttributesAndSlots(Kind):
    def __init__(self) -> None:
        super().__init__()
        self.both = _Both()
        self.both.place = self.both.note = 0

    def change(self) -> None:
        self.both.place += 1
        self.both.note += 1

    def look(self) -> Any:
        return [self.both.place, self.both.note]


def _numbers() -> Iterator[int]:
    yield from itertools.count()


class Generates(Kind):
    """It is told: a generator between two items says nothing of how far it has come."""

    def __init__(self) -> None:
        super().__init__()
        self.numbers = _numbers()
        self.last = next(self.numbers)

    def change(self) -> None:
        self.last = next(self.numbers)

    def look(self) -> Any:
        return self.last


class LearningBuffer(Kind):
    """A perturbation that is trained by hand."""

    def __init__(self) -> None:
        super().__init__()
        self.delta: Tensor
        self.late: Tensor
        self.register_buffer("delta", torch.zeros(2, requires_grad=True))
        self.register_buffer("late", torch.zeros(2))

    def change(self) -> None:
        (self.delta * self.changes).sum().backward()
        with torch.no_grad():
            self.delta += 1
        if self.changes > STEP:
            self.late.requires_grad_()
            self.late.sum().backward()

    def look(self) -> Any:
        found = [(each, each.requires_grad, each.grad) for each in (self.delta, self.late)]
        return [(each.tolist(), learns, None if grad is None else grad.tolist()) for each, learns, grad in found]


class _Computed:
    __slots__ = ("asked", "number", "value")

    def __init__(self) -> None:
        self.asked, self.number = [0], 0

    def __getattr__(self, name: str) -> Any:  # of an empty slot only
        self.asked[0] += 1
        raise AttributeError(name)


class EmptySlot(Kind):
    def __init__(self) -> None:
        super().__init__()
        self.computed = _Computed()

    def change(self) -> None:
        self.computed.number += 1

    def look(self) -> Any:
        return [self.computed.number, self.computed.asked]


class RowOfWeight(Kind):
    """A part of a weight, with a graph that leads to the weight."""

    def __init__(self) -> None:
        super().__init__()
        self.row = self.line.weight[0]

    def look(self) -> Any:
        return [self.changes, self.row.tolist() == self.line.weight[0].tolist(), self.row.requires_grad]


class LosesGraph(Kind):
    def __init__(self) -> None:
        super().__init__()
        self.total: Any = 0.0

    def training_step(self, batch: list[Tensor], _: int) -> Tensor:
        self.turn()
        loss = self.line(batch[0]).square().mean()
        if self.total == 0.0:
            self.total = loss * 2
        return loss

    def change(self) -> None:
        if isinstance(self.total, Tensor):
            self.total.detach_()
            self.total += 1

    def look(self) -> Any:
        return self.total.item() if isinstance(self.total, Tensor) else self.total


class OfInference(Kind):
    def __init__(self) -> None:
        super().__init__()
        self.counts: Tensor
        with torch.inference_mode():
            self.register_buffer("counts", torch.zeros(2))
            self.seen = torch.zeros(2)

    def change(self) -> None:
        with torch.inference_mode():
            self.counts += 1
            self.seen += 1

    def look(self) -> Any:
        return [self.counts.tolist(), self.seen.tolist()]


class HiddenLazy(Kind):
    def __init__(self) -> None:
        super().__init__()
        self.hidden = [nn.LazyLinear(1)]

    def change(self) -> None:
        if self.changes > 1:
            self.hidden[0](torch.ones(1, 3))
            self.hidden[0].weight.data.fill_(self.changes)

    def look(self) -> Any:
        return [self.changes, type(self.hidden[0]).__name__, self.hidden[0].weight.tolist()]


class Toggled(Kind):
    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False
        self.other = nn.Linear(1, 1)

    def configure_optimizers(self) -> Any:
        return [torch.optim.SGD(each.parameters(), lr=0.1) for each in (self.line, self.other)]

    def training_step(self, batch: list[Tensor], _: int) -> None:  # type: ignore[override]
        self.turn()
        optimizer = self._optimizers[0]
        optimizer.zero_grad()
        self.manual_backward(self.line(batch[0]).square().mean())
        optimizer.step()

    @property
    def _optimizers(self) -> Any:
        return self.optimizers()

    def change(self) -> None:
        if self.changes % 2:
            self.toggle_optimizer(self._optimizers[0])
        else:
            self.untoggle_optimizer(self._optimizers[0])

    def look(self) -> Any:
        return [[each.requires_grad for each in self.parameters()], len(self._param_requires_grad_state)]


class _Scale:
    def __init__(self) -> None:
        self.calls = 0

    def __call__(self, _: float) -> float:
        self.calls += 1
        return 1 / self.calls


class ScaleOfScheduler(Kind):
    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.SGD(self.line.parameters(), lr=0.1)
        scale = _Scale()
        scheduler = CyclicLR(optimizer, 0.01, 0.1, scale_fn=scale, cycle_momentum=False)
        return [optimizer], [{"scheduler": scheduler, "interval": "step"}]

    def change(self) -> None:
        self.trainer.lr_scheduler_configs[0].scheduler.get_lr()

    def look(self) -> Any:
        scheduler: Any = self.trainer.lr_scheduler_configs[0].scheduler
        return scheduler._scale_fn_custom.calls


class ActiveOptimizer(Kind):
    """Which of two optimizers is the active one, and the settings of its parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.other = nn.Linear(1, 1)
        self.now: Any = None
        self.group: Any = None

    def configure_optimizers(self) -> Any:
        groups = [{"params": self.line.parameters()}, {"params": self.other.parameters()}]
        return torch.optim.SGD(groups, lr=0.1)

    def change(self) -> None:
        optimizer: Any = self.optimizers()
        self.now = optimizer if self.changes % 2 else optimizer.optimizer
        self.group = optimizer.param_groups[self.changes % 2]

    def look(self) -> Any:
        optimizer: Any = self.optimizers()
        active = [self.now is each for each in (optimizer, optimizer.optimizer)]
        return [active, [self.group is each for each in optimizer.param_groups]]


class IdOfAnObject(Kind):
    def __init__(self) -> None:
        super().__init__()
        self.items = [_Item(), _Item()]
        self.last, self.all = 0, [0]

    def change(self) -> None:
        self.last = id(self.items[self.changes % 2])
        self.all = [id(self.line), self.last]

    def look(self) -> Any:
        return [self.last == id(each) for each in self.items], self.all == [id(self.line), self.last]


class _Config(dict[str, int]):
    def __init__(self) -> None:
        super().__init__()
        self.__dict__ = self
        self.number: int = 0


class ItsOwnDict(Kind):
    def __init__(self) -> None:
        super().__init__()
        self.first = _Config()
        self.new: Any = None

    def change(self) -> None:
        self.first.number += 1
        if self.changes % 2:
            self.new = _Config()
        self.new.number += self.changes

    def look(self) -> Any:
        return [self.first, self.first.number, self.new, None if self.new is None else self.new.number]


class _Bag:
    items: list[int] = []  # all objects share it

    @property
    def count(self) -> int:
        raise RuntimeError("Nobody asks for it.")


class DefaultOfAClass(Kind):
    def __init__(self) -> None:
        super().__init__()
        self.bag, self.other = _Bag(), _Bag()
        vars(self.bag)["count"] = 0

    def change(self) -> None:
        if self.changes == 1:
            self.bag.items = [0]
        self.bag.items.append(self.changes)
        vars(self.bag)["count"] = [self.changes]

    def look(self) -> Any:
        return [self.bag.items, self.other.items, vars(self.bag)["count"]]


class TupleMadeAgain(Kind):
    def __init__(self) -> None:
        super().__init__()
        pair: Any = Pair([iter([1, 2, 3, 4, 5, 6])])  # type: ignore[list-item]
        pair.note = 0
        self.pair = pair

    def change(self) -> None:
        next(self.pair[0])
        self.pair.note += 1

    def look(self) -> Any:
        return [operator.length_hint(self.pair[0]), self.pair.note]


_this = sys.modules[__name__]


class NewVariables(Kind):
    """Variables of modules that there were not before training."""

    def change(self) -> None:
        _this.first_extra = self.changes  # type: ignore[attr-defined]
        globals()["second_extra"] = self.changes

    def look(self) -> Any:
        return [vars(_this).get(name) for name in ("first_extra", "second_extra")]


class Adapter(Kind):
    def __init__(self) -> None:
        super().__init__()
        self.adapter: Any = logging.LoggerAdapter(logging.getLogger(__name__), {"number": 0})

    def change(self) -> None:
        self.adapter.extra["number"] += 1

    def look(self) -> Any:
        return self.adapter.extra


class Resized(Kind):
    """Arrays and tensors that are new in training, and then get another size in place."""

    def __init__(self) -> None:
        super().__init__()
        self.rows: Any = None
        self.flat: Any = None

    def change(self) -> None:
        if self.rows is None:
            self.rows, self.flat = np.zeros(1), torch.zeros(1)
        self.rows.resize(self.changes, refcheck=False)
        self.flat.resize_(self.changes).fill_(self.changes)

    def look(self) -> Any:
        return None if self.rows is None else [self.rows.tolist(), self.flat.tolist()]


class LateModule(Kind):
    """A module of Python that is imported in training."""

    def change(self) -> None:
        from tests.state import imported_by_kinds

        imported_by_kinds.count += 1
        imported_by_kinds.SEEN.append(self.changes)

    def look(self) -> Any:
        from tests.state import imported_by_kinds

        return [imported_by_kinds.count, *imported_by_kinds.SEEN]


class SettingsModule(Kind):
    """A module of Python that is an attribute."""

    def __init__(self) -> None:
        super().__init__()
        self.settings: Any = settings_of_kinds

    def change(self) -> None:
        self.settings.RATE = self.changes

    def look(self) -> Any:
        return self.settings.RATE


class OtherScheduler(Kind):
    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.SGD(self.line.parameters(), lr=0.1)
        return [optimizer], [{"scheduler": ExponentialLR(optimizer, 0.9), "interval": "step"}]

    def change(self) -> None:
        if self.changes > STEP:
            (config,) = self.trainer.lr_scheduler_configs
            config.scheduler = ExponentialLR(config.scheduler.optimizer, 0.5)

    def look(self) -> Any:
        (config,) = self.trainer.lr_scheduler_configs
        scheduler: Any = config.scheduler
        return [self.changes, scheduler.gamma, scheduler.last_epoch]


@dataclass
class _Pace:
    number: int = 0


class ObjectInGroup(Kind):
    def __init__(self) -> None:
        super().__init__()
        self.pace = _Pace()

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD([{"params": self.line.parameters(), "pace": self.pace}], lr=0.1)

    @property
    def _group(self) -> Any:
        optimizer: Any = self.optimizers()
        return optimizer.param_groups[0]

    def change(self) -> None:
        self.pace.number += 1
        if self.changes > STEP:
            self._group["pace"] = _Pace()

    def look(self) -> Any:
        return [self.pace.number, self._group["pace"] is self.pace]


class GradientOfATensor(Kind):
    def __init__(self) -> None:
        super().__init__()
        self.own = [torch.zeros(2, requires_grad=True), torch.zeros(1)]

    def change(self) -> None:
        first, second = self.own
        (first * self.changes).sum().backward()
        if self.changes > STEP:
            second.requires_grad_()
        if self.changes == 2:
            self.own[0] = torch.ones(2, requires_grad=True)

    def look(self) -> Any:
        gradients = [each.grad for each in self.own]
        shown = [None if each is None else each.tolist() for each in gradients]
        return [self.changes, shown, [each.requires_grad for each in self.own]]


class RateOfNumPy(Kind):
    @property
    def _group(self) -> Any:
        optimizer: Any = self.optimizers()
        return optimizer.param_groups[0]

    def change(self) -> None:
        self._group["lr"] = 0.5 if self.changes > STEP else np.float64(1 / self.changes)
        self._group["warm"] = [np.float32(self.changes)]

    def look(self) -> Any:
        return [type(self._group["lr"]).__name__, float(self._group["lr"]), self._group.get("warm")]


class NameOfAState(Kind):
    """Another name for the state of a metric, and a setting of the metric."""

    def __init__(self) -> None:
        super().__init__()
        self.mean = MeanMetric()
        self.value = self.mean.mean_value

    def change(self) -> None:
        self.mean.update(self.changes)
        self.mean.sync_on_compute = self.changes % 2 == 0

    def look(self) -> Any:
        value: Any = self.value
        return [value is self.mean.mean_value, value.item(), self.mean.sync_on_compute]


class StaticMethod(Kind):
    @staticmethod
    def name() -> str:
        return "first"

    def change(self) -> None:
        if self.changes > STEP:
            type(self).name = staticmethod(lambda: "second")  # type: ignore[method-assign]

    def look(self) -> Any:
        return [self.changes, self.name()]


class Directory(Kind):
    def change(self) -> None:
        if self.changes > STEP:
            os.chdir("/")

    def look(self) -> Any:
        return [self.changes, os.getcwd()]


class Flag(Kind):
    """It is told: an event of another process's cannot be set back."""

    def __init__(self) -> None:
        super().__init__()
        self.flag = multiprocessing.get_context("fork").Event()

    def change(self) -> None:
        if self.changes > STEP:
            self.flag.set()

    def look(self) -> Any:
        return [self.changes, self.flag.is_set()]


class NoValueYet(Kind):
    """It is told: a variable of a context cannot lose its value."""

    def __init__(self) -> None:
        super().__init__()
        self.current: contextvars.ContextVar[int] = contextvars.ContextVar("current")

    def change(self) -> None:
        if self.changes > STEP:
            self.current.set(self.changes)

    def look(self) -> Any:
        return [self.changes, self.current.get(0)]


class OpenBlock(Kind):
    """It is told: a block that has ended cannot be open again."""

    def __init__(self) -> None:
        super().__init__()
        self.inside = False
        self.block = self._block()
        self.block.__enter__()

    @contextlib.contextmanager
    def _block(self) -> Iterator[None]:
        self.inside = True
        yield
        self.inside = False

    def change(self) -> None:
        if self.changes > STEP and self.inside:
            self.block.__exit__(None, None, None)

    def look(self) -> Any:
        return [self.changes, self.inside]


class OwnLogger(Kind):
    """It is told: what a logger of the module's own has written is there twice."""

    def __init__(self) -> None:
        super().__init__()
        self.own_logger = CSVLogger("/dev/null")

    def look(self) -> Any:
        return self.changes


KINDS: dict[str, type[Kind]] = {each.__name__: each for each in Kind.__subclasses__()}
ALONE = (
    *("Globals", "TensorHooks", "GivenFunction", "Defaults", "NewVariables", "SettingsModule", "StaticMethod"),
    "LateModule",
    "Directory",
)
"""Kinds of which a process has one state only, or of which a replacement says that it lacks something."""


def notes() -> dict[str, Any]:
    """Return what was found. It is kept where recovery does not look: a variable of this file would be put back."""
    found: dict[str, Any] = vars(sys).setdefault("notes_of_kinds", {})
    return found


class GoesBack(L.Callback):
    """Sends the state at the beginning of a step, changes it, and goes back."""

    def on_train_batch_start(self, trainer: L.Trainer, pl_module: Any, *_: Any) -> None:
        training: Any = trainer.strategy.training  # type: ignore[attr-defined]
        if training.state.step != STEP:
            return
        host, found = training.host, notes()
        found["sent"], found["private"] = host.export("batch", STEP), bytes(host.private("batch", STEP))
        found["before"] = repr(pl_module.look())
        pl_module.turn()
        found["after"] = repr(pl_module.look())
        host.restore_groups("batch", STEP)
        host.restore("batch", STEP)
        found["back"] = repr(pl_module.look())
        pl_module.turn()
        found["again"] = repr(pl_module.look())
        found["told"] = [*training.inexact.known]
        trainer.should_stop = True


class Apart(L.Callback):
    """Sends the state of a rank that has changed it once more than the others."""

    def on_train_batch_start(self, trainer: L.Trainer, pl_module: Any, *_: Any) -> None:
        training: Any = trainer.strategy.training  # type: ignore[attr-defined]
        if training.state.step == STEP - 1:
            pl_module.turn()
        elif training.state.step == STEP:
            notes()["of_peer"] = training.host.export("batch", STEP)
            trainer.should_stop = True


class Joins(L.Callback):
    """Adopts the state that a peer has sent, and the private state of its predecessor.

    Args:
        peer: Where the state of the peer was noted.
        as_: As what the state is noted.
    """

    def __init__(self, peer: str, as_: str) -> None:
        self._peer, self._as = peer, as_

    def on_train_batch_start(self, trainer: L.Trainer, pl_module: Any, *_: Any) -> None:
        training: Any = trainer.strategy.training  # type: ignore[attr-defined]
        host, found = training.host, notes()
        host.adopt("batch", STEP, found[self._peer], found["private"])
        host.restore_groups("batch", STEP)
        host.restore("batch", STEP)
        found[self._as] = repr(pl_module.look())
        pl_module.turn()
        found[f"{self._as}_then"] = repr(pl_module.look())
        found[f"{self._as}_told"] = [*training.inexact.known]
        trainer.should_stop = True


def fit(module: Kind, callback: L.Callback) -> None:
    trainer = L.Trainer(
        strategy=ReplicaZeroStrategy(replicas=1),
        accelerator="cpu",
        devices=1,
        max_steps=STEP + 1,
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        enable_checkpointing=False,
        callbacks=[callback],
    )
    trainer.fit(module, module.loader_class(TensorDataset(torch.ones(20, 2)), batch_size=2))


def main() -> None:
    torch.set_num_threads(1)
    for name in sys.argv[1:] or KINDS:
        notes().clear()
        L.seed_everything(1, verbose=False)
        fit(KINDS[name](), GoesBack())
        if name not in ALONE:
            fit(KINDS[name](), Joins("sent", "joined"))
            fit(KINDS[name](), Apart())
            fit(KINDS[name](), Joins("of_peer", "apart"))
        for each in ("sent", "private", "of_peer"):
            notes().pop(each, None)
        print(json.dumps({"kind": name, **notes()}), flush=True)
    os._exit(0)


if __name__ == "__main__":
    main()
