"""A training with state of every kind that a script may keep: ``python zoo.py``. Its loss depends on all of it."""

import array
import collections
import contextvars
import dataclasses
import enum
import functools
import heapq
import io
import itertools
import multiprocessing
import operator
import os
import queue
import random
import sys
import threading
import types
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import lightning as L
import numpy as np
import pandas as pd
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset, RandomSampler, Sampler

from lightning_replica import ReplicaZeroStrategy


@dataclasses.dataclass
class Data:
    n: int = 0
    xs: list[int] = dataclasses.field(default_factory=list)


@dataclasses.dataclass(frozen=True)
class Frozen:
    n: int = 0


class Slots:
    __slots__ = ("n", "t")

    def __init__(self) -> None:
        self.n, self.t = 0, torch.zeros(2)


class Point(NamedTuple):
    x: int
    y: list[int]


class Guarded:
    """Hides its value behind a property."""

    def __init__(self) -> None:
        self._value = 0

    @property
    def value(self) -> int:
        return self._value

    @value.setter
    def value(self, value: int) -> None:
        self._value = value


class OwnList(list[int]):
    tag = 0


class OwnDict(dict[int, int]):
    tag = 0


class Mode(enum.Enum):
    A = 1
    B = 2


class Node:
    def __init__(self) -> None:
        self.next: Any = None
        self.value = 0


class Locked:
    """Counts under a lock."""

    def __init__(self) -> None:
        self.lock, self.n = threading.Lock(), 0

    def __call__(self) -> int:
        with self.lock:
            self.n += 1
            return self.n


def ticks() -> Callable[[], int]:
    n = 0

    def tick() -> int:
        nonlocal n
        n += 1
        return n

    return tick


class Counting(nn.Module):
    """Counts its calls, and writes to buffers in ways that torch does not count."""

    ema: Tensor
    unsaved: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.lin, self.calls = nn.Linear(4, 4), 0
        self.register_buffer("ema", torch.zeros(4))
        self.register_buffer("unsaved", torch.zeros(4), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        self.ema.data.mul_(0.9).add_(x.detach().mean(0), alpha=0.1)
        self.unsaved.numpy()[:] += 1
        made: Tensor = self.lin(x) + (self.ema + 0.001 * self.unsaved) * 0.01 * self.calls
        return made


class Momentum(torch.optim.SGD):
    """Has attributes on which its updates depend."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, lr=0.01, momentum=0.9)
        self.count, self.history = 0, list[int]()

    def step(self, closure: Any = None) -> Any:
        self.count += 1
        self.history.append(self.count)
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    parameter.grad.mul_(1 + 0.01 * self.count + 0.001 * len(self.history))
        return super().step(closure)


class Rising(torch.optim.lr_scheduler.LRScheduler):
    def __init__(self, optimizer: Any) -> None:
        self.calls = 0
        super().__init__(optimizer)

    def get_lr(self) -> list[float | Tensor]:
        self.calls += 1
        return [rate * (1 + 0.001 * self.calls) for rate in self.base_lrs]


class Samples(Dataset[Tensor]):
    """Depends on what was read before."""

    def __init__(self) -> None:
        self.x = torch.randn(64, 4, generator=torch.Generator().manual_seed(1))
        self.served, self.dice = 0, np.random.default_rng(3)

    def __len__(self) -> int:
        return 64

    def __getitem__(self, index: int) -> Tensor:
        self.served += 1
        return self.x[index] + 0.001 * self.served + float(self.dice.normal()) * 0.01


class Order(Sampler[int]):
    """Shuffles what it shuffled in the last epoch, as that of `chemprop`. Lightning divides it among ranks."""

    def __init__(self, count: int) -> None:
        self.order, self.dice = np.arange(count), np.random.default_rng(7)

    def __iter__(self) -> Iterator[int]:
        self.dice.shuffle(self.order)
        return iter(self.order)

    def __len__(self) -> int:
        return len(self.order)


class Collate:
    n = 0

    def __call__(self, samples: list[Tensor]) -> Tensor:
        self.n += 1
        return torch.stack(samples) * (1 + 0.001 * self.n)


class Module(L.LightningDataModule):
    def __init__(self) -> None:
        super().__init__()
        self.seen, self.numbers = 0, list[int]()

    def train_dataloader(self) -> Any:
        samples = Samples()
        return DataLoader(samples, 4, sampler=Order(len(samples)), collate_fn=Collate())

    def on_after_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
        self.seen += 1
        self.numbers.append(dataloader_idx)
        return batch * (1 + 0.0001 * self.seen)


class Shadow(L.Callback):
    """Keeps an average of the weights, and writes to them in two hooks."""

    def __init__(self) -> None:
        self.n, self.losses, self.best = 0, list[float](), float("inf")
        self.shadow: Any = None

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.n += 1
        self.losses.append(float(outputs["loss"]))
        self.best = min(self.best, self.losses[-1])
        with torch.no_grad():
            if self.shadow is None:
                self.shadow = [parameter.detach().clone() for parameter in pl_module.parameters()]
            for shadow, parameter in zip(self.shadow, pl_module.parameters(), strict=True):
                shadow.lerp_(parameter.detach(), 0.1)
            pl_module.sub.lin.bias.add_(self.shadow[0].mean() * 0.001 * self.n)

    def on_before_zero_grad(self, trainer: Any, pl_module: Any, optimizer: Any) -> None:
        pl_module.net[0].weight.data.mul_(1 - 0.0001 * self.n)


class Kept:
    """State of all kinds; `advance` changes each, and returns numbers that depend on each."""

    def __init__(self) -> None:
        self.i, self.f, self.s, self.b, self.c = 0, 0.0, "", b"", 1j
        self.none: int | None = None
        self.list, self.dict, self.set, self.frozen = list[int](), dict[int, Any](), set[int](), frozenset[int]()
        self.tuple = (0, [0])
        self.deque: Any = collections.deque(maxlen=3)
        self.default: Any = collections.defaultdict(list)
        self.ordered: Any = collections.OrderedDict()
        self.counter: Any = collections.Counter()
        self.chain: Any = collections.ChainMap({}, {})
        self.data, self.unchanging, self.slots, self.point = Data(), Frozen(), Slots(), Point(0, [0])
        self.guarded, self.own_list, self.own_dict, self.mode = Guarded(), OwnList(), OwnDict(), Mode.A
        self.ring = Node()
        self.ring.next = Node()
        self.ring.next.next = self.ring
        self.space, self.tick, self.locked = types.SimpleNamespace(n=0), ticks(), Locked()
        self.partial: Any = functools.partial(pow, 2)
        self.iterator, self.keys = iter(range(1000)), iter({n: n for n in range(1000)})
        self.noise = torch.Generator().manual_seed(2)
        self.dice, self.own_dice = random.Random(4), np.random.default_rng(5)
        self.old_dice, self.bits, self.seeds = np.random.RandomState(6), np.random.PCG64(7), np.random.SeedSequence(8)
        self.tensor, self.base = torch.zeros(3), torch.arange(10.0)
        self.view = self.base[2:5]
        self.array, self.base_array = np.zeros(3), np.arange(10.0)
        self.view_array = self.base_array[1:4]
        self.objects = np.array([1, [2]], dtype=object)
        self.masked = np.ma.masked_array([1.0, 2.0], mask=[False, True])
        self.records = np.zeros(2, dtype=[("a", "i4"), ("b", "f4")])
        self.scalar: Any = np.float64(0)
        self.bytearray, self.array_of_c, self.heap = bytearray(b"abc"), array.array("d", [0.0]), list[int]()
        self.large, self.sparse = torch.zeros(300_000), torch.zeros(4, 4).to_sparse()
        self.bytes_io, self.string_io = io.BytesIO(), io.StringIO()
        self.queue: Any = queue.Queue()
        self.append: Any = self.list.append
        self.shared = {"list": self.list}
        self.closure = (lambda of: lambda: of["n"])(vars(self.space))
        self.table = pd.DataFrame({"number": [0.5], "text": ["a"]})
        self.late_table: Any = None
        self.pair: list[np.random.Generator] = []
        self.hidden: Any = None

    def advance(self) -> Iterator[Any]:
        self.i = n = self.i + 1
        self.f, self.s, self.b, self.c = self.f + 0.5, self.s + "x", self.b + b"y", self.c + 1
        self.none = n if n % 2 else None
        yield from (self.f, len(self.s), len(self.b), abs(self.c), self.none or 0)
        yield from self._containers(n)
        yield from self._objects(n)
        yield from self._sources(n)
        yield from self._memory(n)
        yield from self._libraries(n)

    def _containers(self, n: int) -> Iterator[Any]:
        self.list.append(n)
        self.append(n)
        self.dict[n] = [n]
        self.set.add(n)
        self.frozen = self.frozen | {n}
        self.tuple[1][0] += 1
        self.tuple = (n, self.tuple[1])
        self.deque.append(n)
        self.default[n % 3].append(n)
        self.ordered[n % 2] = n
        self.ordered.move_to_end(n % 2)
        self.counter[n % 4] += 1
        self.chain[n % 2] = n
        heapq.heappush(self.heap, -n)
        self.own_list.append(n)
        self.own_dict[n] = n
        self.own_list.tag = self.own_dict.tag = n
        yield from (sum(self.list), len(self.dict), len(self.set), len(self.frozen), self.tuple[0] + self.tuple[1][0])
        yield from (
            sum(self.deque),
            len(self.default[0]),
            next(iter(self.ordered.values())),
            max(self.counter.values()),
        )
        yield from (sum(self.chain.values()), self.heap[0], len(self.own_list) + self.own_list.tag)
        yield from (len(self.own_dict) + self.own_dict.tag, len(self.shared["list"]))

    def _objects(self, n: int) -> Iterator[Any]:
        self.data.n += 1
        self.data.xs.append(n)
        self.unchanging = dataclasses.replace(self.unchanging, n=n)
        self.slots.n += 1
        self.slots.t.data += 1
        self.point = self.point._replace(x=n)
        self.point.y[0] += 1
        self.guarded.value += 1
        self.mode = Mode.B if n % 2 else Mode.A
        self.ring = self.ring.next
        self.ring.value += 1
        self.space.n += 1
        self.partial = functools.partial(pow, 2 + n % 2)
        yield from (self.data.n + len(self.data.xs), self.unchanging.n, self.slots.n + float(self.slots.t.sum()))
        yield from (self.point.x + self.point.y[0], self.guarded.value, self.mode.value, self.ring.value, self.space.n)
        yield from (self.partial(3), self.tick(), self.locked(), self.closure())

    def _sources(self, n: int) -> Iterator[Any]:
        self.bytes_io.write(b"z")
        self.string_io.write("z")
        self.queue.put(n)
        yield from (next(self.iterator), next(self.keys), float(torch.rand(1, generator=self.noise)))
        yield from (self.dice.random(), self.own_dice.normal(), self.old_dice.rand(), random.random())
        yield from (self.bits.random_raw() % 100, self.own_dice.spawn(1)[0].normal())
        yield int(self.seeds.spawn(1)[0].generate_state(1)[0]) % 100
        yield from (np.random.rand(), self.bytes_io.tell(), self.string_io.tell(), self.queue.qsize())

    def _memory(self, n: int) -> Iterator[Any]:
        self.tensor.data += 1
        self.view.data.mul_(1.1)
        self.array += 1
        self.view_array *= 1.1
        self.objects[1].append(n)
        self.masked[0] += 1
        self.records["a"] += 1
        self.scalar = self.scalar + 1
        self.bytearray.append(n)
        self.array_of_c[0] += 1
        self.large.data[n] = n
        self.sparse = (self.sparse.to_dense() + 1).to_sparse()
        self.hidden = torch.ones(4) * n if self.hidden is None else self.hidden * 1.01
        yield from (each.sum() for each in (self.tensor, self.base, self.large, self.hidden, self.sparse.to_dense()))
        yield from (self.array.sum(), self.base_array.sum(), len(self.objects[1]), self.masked[0], self.records["a"][0])
        yield from (self.scalar, len(self.bytearray), self.array_of_c[0])

    def _libraries(self, n: int) -> Iterator[Any]:
        """What they keep in C."""
        self.table.loc[0, "number"] += n
        self.table.loc[len(self.table)] = [n, "b"]
        self.late_table = pd.concat([self.table.head(1), self.table.tail(2)])
        if not self.pair:
            bits = np.random.PCG64(9)
            self.pair = [np.random.Generator(bits), np.random.Generator(bits)]
        yield from (self.table["number"].sum(), len(self.table), self.late_table["number"].mean())
        yield from (each.normal() for each in self.pair)


class FromItertools:
    """Python 3.14 says nothing of how far most of these have come."""

    def __init__(self) -> None:
        self.cycle, self.count = itertools.cycle([1, 2, 3]), itertools.count(1)
        self.chain = itertools.chain([1, 2], range(1000))

    def advance(self) -> Iterator[Any]:
        yield from (next(self.cycle), next(self.count), next(self.chain))


class CountedDice(random.Random):
    rolls = 0


class Probe:
    """Trains a model of its own, beside that of the trainer, and counts in objects that containers hold as members."""

    def __init__(self, weight: nn.Parameter) -> None:
        self.head = nn.Linear(4, 1)
        self.optimizer = torch.optim.Adam(self.head.parameters(), lr=0.1)
        self.scheduler = torch.optim.lr_scheduler.StepLR(self.optimizer, 2, 0.9)
        self.weight, self.dice, self.sampler = weight, CountedDice(7), RandomSampler(range(3))
        self.members, self.by_node = {Node()}, {Node(): 0}

    def advance(self) -> Iterator[Any]:
        with torch.enable_grad():
            self.optimizer.zero_grad()
            loss = self.head(torch.ones(4)).square().sum()
            loss.backward()
        self.optimizer.step()
        self.scheduler.step()
        weight: Any = self.weight
        weight.importance = getattr(weight, "importance", 0) + 1
        weight.average = 0.9 * getattr(weight, "average", torch.zeros(())) + self.weight.detach().mean()
        self.dice.rolls += 1
        self.sampler.drawn = getattr(self.sampler, "drawn", 0) + 1  # type: ignore[attr-defined]
        yield from (loss, self.scheduler.get_last_lr()[0], weight.importance, weight.average)
        yield from (self.dice.rolls, self.dice.random(), self.sampler.drawn)  # type: ignore[attr-defined]
        for node in (*self.members, *self.by_node):
            node.value += 1
            yield node.value


class InScript(nn.Module):
    """Compiled by torch.jit: its attributes live in C++."""

    calls: int
    seen: list[int]

    def __init__(self) -> None:
        super().__init__()
        self.calls, self.seen, self.mean, self.norm = 0, [0], torch.zeros(4), nn.BatchNorm1d(4)

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        self.seen.append(self.calls)
        self.mean = self.mean * 0.9 + x.detach().mean(0)
        out: Tensor = self.norm(x) * (1 + 0.01 * self.calls) + 0.001 * len(self.seen) * self.mean
        return out


gradient_of = operator.attrgetter("grad")  # code that reads the attribute would have all gradients gathered
STEPS = 0
CACHE: dict[int, list[int]] = {}
THREAD = threading.local()
TURN: contextvars.ContextVar[int] = contextvars.ContextVar("TURN", default=0)


class Stage(enum.Enum):
    FIRST = 1
    SECOND = 2


class Registry:
    created = 0
    names: list[str] = []


class Used(int):
    uses = 0


def noted(number: int, seen: list[int] = []) -> int:  # noqa: B006
    seen.append(number)
    return sum(seen)


def calls() -> int:
    here: Any = calls
    here.made = getattr(here, "made", 0) + 1
    return int(here.made)


@functools.cache
def dice_of(name: str) -> np.random.Generator:
    return np.random.default_rng(len(name))


@functools.lru_cache
def bank_of(size: int, *, value: float = 0.0) -> Tensor:
    return torch.full((size,), value)


@functools.lru_cache(maxsize=4)
def noise_of(turn: int) -> Tensor:
    return torch.rand(2)


class Luck:
    @functools.cache  # noqa: B019
    def of(self, turn: int) -> float:
        return random.random()


LUCK = Luck()


def falling() -> Callable[[int], float]:
    """A factor of the learning rate that counts by itself."""
    asked = 0

    def factor(epoch: int) -> float:
        nonlocal asked
        asked += 1
        return 1 / (1 + 0.01 * asked)

    return factor


class Outside:
    """Keeps what it counts beside objects: in modules, classes, functions, a thread, a context, in others' objects."""

    def __init__(self) -> None:
        self.leaf, self.used = torch.ones(3, requires_grad=True), Used(3)
        self.shared = multiprocessing.Value("i", 0)

    def advance(self, module: L.LightningModule) -> Iterator[Any]:
        global STEPS
        STEPS += 1
        CACHE.setdefault(STEPS % 3, []).append(STEPS)
        THREAD.count = getattr(THREAD, "count", 0) + 1
        TURN.set(TURN.get() + 1)
        Registry.created += 1
        Registry.names.append(str(STEPS))
        self.used.uses += 1
        with torch.enable_grad():
            self.leaf.square().sum().backward()
        self.shared.value += 1
        trainer: Any = module.trainer
        trainer.rounds = getattr(trainer, "rounds", 0) + 1
        buffer: Any = module.get_buffer("net.1.running_mean")
        buffer.rounds = getattr(buffer, "rounds", 0) + 1
        yield from (STEPS, sum(map(len, CACHE.values())), THREAD.count, TURN.get(), gradient_of(self.leaf).sum())
        yield from (Registry.created, len(Registry.names), self.used + self.used.uses, noted(1), calls())
        optimizer, stage = trainer.optimizers[0], Stage.SECOND
        stage.visits = getattr(stage, "visits", 0) + 1  # type: ignore[attr-defined]
        os.environ["ZOO_TURN"] = str(int(os.environ.get("ZOO_TURN", "0")) + 1)
        optimizer.rounds = getattr(optimizer, "rounds", 0) + 1
        optimizer.defaults["rounds"] = optimizer.defaults.get("rounds", 0) + 1
        optimizer.param_groups[0]["rounds"] = optimizer.param_groups[0].get("rounds", 0) + 1
        yield from (stage.visits, int(os.environ["ZOO_TURN"]))  # type: ignore[attr-defined]
        yield from (optimizer.rounds, optimizer.defaults["rounds"], optimizer.param_groups[0]["rounds"])
        bank_of(3, value=1.0).data.mul_(1.01)
        yield from (self.shared.value, dice_of("data").normal(), bank_of(3, value=1.0).sum())
        yield from (noise_of(STEPS % 4).sum(), LUCK.of(STEPS % 5))
        yield from (trainer.rounds, buffer.rounds, trainer.lr_scheduler_configs[0].scheduler.get_last_lr()[0])


class Zoo(L.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Dropout(0.1), nn.Linear(8, 4))
        self.sub, self.out = Counting(), nn.Linear(4, 1)
        self.teacher: Any = nn.Parameter(torch.zeros(4), requires_grad=False)
        # As libraries mark parameters: once, when they build the model.
        self.teacher.rate = 0.1  # type: ignore[attr-defined]
        self.kept, self.made = Kept(), FromItertools() if sys.version_info < (3, 14) else None
        self.references: list[Any] = [self.out.weight]
        self.by_name: dict[str, Any] = {"w": self.net[0].weight}
        self.compiled: Any = torch.jit.script(InScript()) if sys.version_info < (3, 14) else nn.Identity()
        self.probe = Probe(self.out.weight)  # type: ignore[arg-type]
        self.outside = Outside()
        self.extra = nn.Parameter(torch.ones(2))  # of no optimizer; its gradient grows

    def numbers(self) -> Iterator[Any]:
        self.teacher.data += self.teacher.rate
        yield from self.kept.advance()
        yield from () if self.made is None else self.made.advance()
        yield from self.probe.advance()
        yield from self.outside.advance(self)
        gradient = gradient_of(self.extra)
        yield 0 if gradient is None else gradient.sum()
        yield from (self.teacher.sum(), self.references[0].sum(), self.by_name["w"].sum())

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        total = sum(float(number) for number in self.numbers())
        found: Tensor = self.out(self.compiled(self.sub(self.net(batch))))
        loss = (found * (1 + 1e-4 * total)).square().mean() + 1e-3 * self.extra.sum()
        self.log("loss", loss, on_epoch=True)
        return {"loss": loss, "total": total}

    def configure_optimizers(self) -> Any:
        optimizer = Momentum(each for each in self.parameters() if each is not self.extra)
        schedulers = [torch.optim.lr_scheduler.LambdaLR(optimizer, falling()), Rising(optimizer)]
        return [optimizer], [{"scheduler": scheduler, "interval": "step"} for scheduler in schedulers]


def main() -> None:
    L.seed_everything(3, verbose=False)
    trainer = L.Trainer(
        strategy=ReplicaZeroStrategy(),
        accelerator="cpu",
        devices=2,
        max_epochs=2,
        enable_progress_bar=False,
        enable_model_summary=False,
        enable_checkpointing=False,
        logger=False,
        callbacks=[Shadow()],
    )
    trainer.fit(Zoo(), datamodule=Module())


if __name__ == "__main__":
    main()
