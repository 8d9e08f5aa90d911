"""What the user's objects hold: what is taken, how it is put back, what travels."""

import array
import copy
import datetime
import enum
import functools
import random
import re
import threading
import weakref
from collections import Counter, OrderedDict, defaultdict, deque, namedtuple
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from lightning.pytorch import Callback, LightningDataModule, LightningModule
from lightning.pytorch.callbacks import EarlyStopping, Timer
from torch import nn
from torch.nn.utils import prune
from torchmetrics import MeanMetric, MinMaxMetric

from lightning_replica import RecoveryCallback
from lightning_replica._compat.tree import Tree
from lightning_replica.core import plain
from lightning_replica.core.inexact import Inexact
from lightning_replica.state.objects.randomness import generator_of
from lightning_replica.state.objects.signature import Signature, differences, digest_of, signature_of
from lightning_replica.state.objects.tracked import Taken
from lightning_replica.state.reachable import Reachable

Pair = namedtuple("Pair", "a b")


class Cell(nn.Linear):
    """Of the user's own class, with state of its own."""

    calls: int
    begun: bool
    last: Any

    def __init__(self) -> None:
        super().__init__(2, 2)
        self.calls, self.begun, self.last = 0, False, None


class Module(LightningModule):
    plain: Any
    by_name: dict[str, Any]
    outputs: Any
    late: Any
    mixed: Any

    def __init__(self) -> None:
        super().__init__()
        self.count, self.rate, self.begun = 1, 0.5, False
        self.hidden: Any = None
        self.outputs: list[object] = [torch.ones(2)]
        self.by_name = {"a": [1, 2]}
        self.seen = {3}
        self.mean = torch.zeros(2)
        self.history = np.zeros(2)
        self.recent = deque([1], maxlen=2)
        self.pair = Pair(torch.ones(1), 2)
        self.dice = random.Random(1)
        self.noise = torch.Generator().manual_seed(3)
        self.other = object()
        self.cell = Cell()
        self.plain = nn.Linear(2, 2)
        self.mine = [self.plain.weight]


class Copies:
    """A trainer with a module, and what its objects hold."""

    def __init__(self, module: LightningModule, *callbacks: Any, data: Any = None) -> None:
        self.module, self.inexact = module, Inexact()
        loop = SimpleNamespace(_combined_loader=None)
        trainer: Any = SimpleNamespace(
            lightning_module=module,
            callbacks=list(callbacks),
            datamodule=data,
            optimizers=[],
            lr_scheduler_configs=[],
            loggers=[],
            fit_loop=SimpleNamespace(_combined_loader=None, epoch_loop=SimpleNamespace(val_loop=loop)),
            strategy=SimpleNamespace(_lightning_optimizers=[]),
        )
        self.reachable = Reachable(trainer, self.inexact.report)
        self.tree: Tree | None = None

    def take(self) -> Taken:
        self.tree = Tree.of(self.module, self.tree)
        return self.reachable.take(self.tree)

    def put(self, taken: Taken) -> None:
        self.reachable.put_back(taken)

    def whole(self, taken: Taken | None = None) -> list[Any]:
        return self.reachable.whole(taken or self.take())

    def private(self, taken: Taken | None = None) -> list[Any]:
        return self.reachable.private(taken or self.take())


def take(module: Module, copies: Copies | None = None) -> Taken:
    return (copies or Copies(module)).take()


def put_sent(module: LightningModule, sent: list[Any]) -> Copies:
    """Give a replacement's module what has been sent, through bytes."""
    copies = Copies(module)
    copies.reachable.put_sent(plain.unpack(plain.pack(sent)))
    return copies


def done_again(module: Any) -> tuple[Copies, list[Any]]:
    """Has a module advance three times, go back and advance again; returns what came of it each time, the same."""
    copies = Copies(module)
    module.advance()
    taken = copies.take()
    expected = [module.advance() for _ in range(3)]
    copies.put(taken)
    assert [module.advance() for _ in range(3)] == expected
    return copies, expected


def train(module: Module) -> None:
    """Changes everything, in place where that is possible."""
    module.count, module.rate, module.begun = 7, 0.1, True
    module.hidden = (torch.ones(2, requires_grad=True) * 2, torch.ones(1))
    module.outputs.append(torch.zeros(1))
    module.by_name["a"].append(3)
    module.by_name["b"] = []
    module.seen.clear()
    module.mean.add_(1)
    module.history += 1
    module.recent.extend([5, 6])
    module.pair.a.zero_()
    module.dice.random()
    torch.rand(1, generator=module.noise)
    module.cell.calls, module.cell.begun, module.cell.last = 4, True, torch.ones(1)
    module.late = 3


def drawn(module: Module) -> tuple[float, float]:
    return module.dice.random(), float(torch.rand(1, generator=module.noise))


def state(module: Module) -> dict[str, Any]:
    names = ("count", "rate", "begun", "by_name", "seen", "recent")
    found = {name: getattr(module, name) for name in names}
    found["hidden"] = None if module.hidden is None else [h.tolist() for h in module.hidden]
    found["tensors"] = [t.tolist() for t in (*module.outputs, module.mean, module.pair.a)]
    found["history"], found["cell"] = module.history.tolist(), (module.cell.calls, module.cell.begun)
    found["last"] = None if module.cell.last is None else module.cell.last.tolist()
    return found


def copied(found: dict[str, Any]) -> dict[str, Any]:
    return {**found, "by_name": {k: list(v) for k, v in found["by_name"].items()}, "seen": set(found["seen"])} | {
        "recent": deque(found["recent"])
    }


@pytest.mark.parametrize("trained", [False, True])
def test_everything_goes_back_any_number_of_times(trained: bool) -> None:
    module = Module()
    copies = Copies(module)
    if trained:
        train(module)
    taken, before = take(module, copies), copied(state(module))
    outputs, mean = module.outputs, module.mean
    numbers = None
    for _ in range(2):
        train(module)
        copies.put(taken)
        assert state(module) == before
        assert hasattr(module, "late") == trained
        assert module.outputs is outputs  # whoever else holds it sees it
        assert module.mean is mean
        numbers = numbers or drawn(module)
        copies.put(taken)
        assert drawn(module) == numbers


def test_references_go_back_and_weights_do_not() -> None:
    module = Module()
    copies = Copies(module)
    taken, other, weight = copies.take(), module.other, module.plain.weight
    module.other, changed = object(), torch.ones(2, 2)
    module.mine[0] = nn.Parameter(torch.zeros(1))
    with torch.no_grad():
        weight.copy_(changed)
    copies.put(taken)
    assert module.other is other
    assert module.mine[0] is weight
    assert torch.equal(weight, changed)  # parameters are put back by others


def test_a_replacement_gets_all_of_it() -> None:
    module = Module()
    copies = Copies(module)
    train(module)
    taken = copies.take()
    numbers = drawn(module)
    for sent in (copies.private(taken), copies.whole(taken)):
        fresh = Module()
        put_sent(fresh, sent)
        assert state(fresh) == state(module)
        assert isinstance(fresh.pair, Pair)
        assert fresh.recent.maxlen == 2
        assert fresh.mine[0] is fresh.plain.weight
        assert fresh.late == 3
        assert drawn(fresh) == numbers


def test_only_what_has_changed_is_mirrored() -> None:
    module = Module()
    copies = Copies(module)
    assert copies.private() == []
    module.cell.calls += 1
    assert copies.private() == [["module.cell", [["calls", 1]]]]
    module.mean.add_(1)
    (_, values), _ = copies.private()
    assert [name for name, _ in values] == ["mean"]


def test_what_is_gone_is_gone_in_a_replacement() -> None:
    module, built = Module(), Module()
    copies = Copies(module)
    del module.rate, module.cell.last
    sent = copies.private()
    assert sent == [["module", [["rate", ["-"]]]], ["module.cell", [["last", ["-"]]]]]
    put_sent(built, sent)
    put_sent(built, sent)
    assert not hasattr(built, "rate")
    assert not hasattr(built.cell, "last")


def test_where_a_checkpoint_may_have_set_attributes_all_are_mirrored() -> None:
    class Loads(Module):
        def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
            self.count = checkpoint["count"]

    (name, values), *_ = Copies(Loads()).private()
    assert name == "module"
    assert ["count", 1] in values


def test_large_attributes_are_told_of_and_not_mirrored_but_a_peer_has_them() -> None:
    module = Module()
    copies = Copies(module)
    module.outputs = [torch.ones(2**20), torch.ones(2**10)]
    module.by_name = {"many": set(range(5000))}
    taken = copies.take()
    assert copies.private(taken) == [["", ["module.by_name", "module.outputs"]]]
    assert set(copies.inexact.known) == {"module.outputs", "module.by_name"}
    fresh = Module()
    put_sent(fresh, copies.whole(taken))
    assert [t.numel() for t in fresh.outputs] == [2**20, 2**10]
    assert fresh.by_name == module.by_name
    module.outputs.append(torch.ones(1))
    module.outputs[1].zero_()
    module.by_name["many"].pop()
    copies.put(taken)
    assert (len(module.outputs), len(module.by_name["many"])) == (2, 5000)
    assert module.outputs[1].min() == 1


def test_a_tensor_is_copied_once() -> None:
    module = Module()
    copies = Copies(module)

    def kept(taken: Taken) -> Any:
        (found,) = (copy for held, copy in taken.capture.copies if held.value is module.mean)
        return found

    first, second = copies.take(), copies.take()
    assert first is second
    module.mean.add_(1)
    assert kept(copies.take()) is not kept(first)


def test_what_another_rank_cannot_have_stays_as_it_was_built() -> None:
    module = Module()
    copies = Copies(module)
    module.mixed = [object()]
    module.count = 2
    fresh = Module()
    found = put_sent(fresh, copies.private())
    assert fresh.count == 2
    assert "module.mixed[0]" in found.inexact.known


def test_a_container_that_contains_itself() -> None:
    module, fresh = Module(), Module()
    copies = Copies(module)
    module.by_name["a"] = [module.by_name]
    taken = copies.take()
    module.by_name["a"].pop()
    copies.put(taken)
    assert module.by_name["a"][0] is module.by_name
    put_sent(fresh, copies.whole(taken))
    assert fresh.by_name["a"][0] is fresh.by_name


class WithHyperparameters(LightningModule):
    hparams: Any

    def __init__(self, lr: float = 0.1) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.counted = Counter("aab")
        self.lists: defaultdict[str, list[int]] = defaultdict(list, a=[1])


@pytest.mark.parametrize("travels", [False, True])
def test_containers_stay_what_they_are(travels: bool) -> None:
    """Hyperparameters are read as attributes, missing keys of a Counter and a defaultdict are made: no plain dicts."""
    module = WithHyperparameters()
    copies = Copies(module)
    module.hparams.lr, module.lists["x"] = 0.3, [3]
    module.counted["b"] += 1
    hparams = module.hparams
    taken = copies.take()
    sent = copies.whole(taken)
    module.hparams.lr = 0.2
    module.counted["c"] += 1
    module.lists["b"].append(2)
    if travels:
        module = WithHyperparameters()
        hparams = module.hparams
        put_sent(module, sent)
    else:
        copies.put(taken)
    assert module.hparams is hparams
    assert module.hparams.lr == 0.3
    assert module.counted["z"] == 0
    assert (dict(module.counted), dict(module.lists)) == ({"a": 2, "b": 2}, {"a": [1], "x": [3]})
    module.lists["new"].append(3)


def test_a_pruned_weight_goes_back() -> None:
    """It is a plain attribute of torch's own module, made anew in each forward; the next pruning looks at it."""
    module = Module()
    copies = Copies(module)
    prune.l1_unstructured(module.plain, "weight", 0.5)
    taken = copies.take()
    weight = module.plain.weight.detach().clone()
    module.plain.weight_orig.data.add_(1)
    module.plain(torch.ones(1, 2))
    copies.put(taken)
    assert torch.equal(module.plain.weight, weight)
    fresh = Module()
    prune.l1_unstructured(fresh.plain, "weight", 0.5)
    put_sent(fresh, copies.private(taken))
    assert torch.equal(fresh.plain.weight, weight)


@pytest.mark.parametrize("kind", ["parameter", "buffer", "submodule"])
def test_what_is_registered_is_not_written_over(kind: str) -> None:
    """A plain attribute that has become a parameter of that name since, or was one only on another rank."""
    module: Any = LightningModule()
    copies = Copies(module)
    module.weight = 3
    taken = copies.take()
    sent = copies.whole(taken)
    del module.weight
    made: Any = {"parameter": nn.Parameter(torch.ones(1)), "buffer": nn.Buffer(torch.ones(1)), "submodule": nn.ReLU()}
    module.weight = made[kind]
    copies.put(taken)
    put_sent(module, sent)
    assert module.weight is made[kind]


def test_what_a_metric_keeps_beside_its_states() -> None:
    """`MinMaxMetric` has its extremes in plain attributes. Declared states are put back by state/metrics.py."""

    class Measured(LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.extremes: Any = MinMaxMetric(MeanMetric())

    module = Measured()
    copies, metric = Copies(module), module.extremes
    for value in (3.0, 1.0, 2.0):
        metric.update(torch.tensor(value))
        metric.compute()
        metric.reset()
    taken = copies.take()
    sent = copies.private(taken)
    metric.update(torch.tensor(0.0))
    metric.compute()
    copies.put(taken)
    assert (float(metric.min_val), float(metric.max_val)) == (1.0, 3.0)
    assert metric._base_metric.weight == 1.0
    fresh = Measured()
    put_sent(fresh, sent)
    assert (float(fresh.extremes.min_val), float(fresh.extremes.max_val)) == (1.0, 3.0)


def test_a_tensor_that_cannot_travel_stays_as_it_was_built() -> None:
    module = Module()
    copies = Copies(module)
    module.hidden = torch.eye(2).to_mkldnn()
    module.count = 2
    taken = copies.take()
    fresh = Module()
    found = put_sent(fresh, copies.private(taken))
    assert (fresh.count, fresh.hidden) == (2, None)
    assert "module.hidden" in found.inexact.known
    module.hidden = None
    copies.put(taken)
    assert torch.equal(module.hidden.to_dense(), torch.eye(2))


class Generators(LightningModule):
    """Sources of random numbers wherever they may be, some of them made while training."""

    def __init__(self) -> None:
        super().__init__()
        new = random.Random(1), torch.Generator().manual_seed(2), np.random.default_rng(3), np.random.RandomState(4)
        self.listed, self.named = list(new), dict(enumerate(new))
        self.deep = [[{"a": (random.Random(5),)}]]
        self.made: Any = None

    def begin(self) -> None:
        self.made = [random.Random(6), torch.Generator().manual_seed(7), np.random.default_rng(8)]
        self.made += [np.random.RandomState(9), np.random.Generator(np.random.MT19937(10))]
        self.draw()

    def draw(self) -> list[float]:
        found = (*self.listed, *self.deep[0][0]["a"], *(self.made or ()))
        return [float(torch.rand(1, generator=g)) if isinstance(g, torch.Generator) else g.random() for g in found]


def test_a_replacement_gets_generators_in_containers_and_new_ones() -> None:
    module, other = Generators(), Generators()
    copies, listed = Copies(module), list(other.listed)
    module.begin()
    put_sent(other, copies.private())
    # The objects stay: whoever else holds one draws from it.
    assert all(now is before for now, before in zip(other.listed, listed, strict=True))
    assert other.named[0] is other.listed[0]
    assert other.draw() == module.draw()


def test_the_state_of_a_generator_that_cannot_be_here_is_left_out() -> None:
    """A generator on a GPU has a state of 16 bytes. In a process without GPU, nothing can take it."""
    here = torch.Generator().manual_seed(3)
    state = here.get_state()
    assert generator_of(torch.zeros(16, dtype=torch.uint8), here) is here
    assert torch.equal(here.get_state(), state)
    assert generator_of(torch.zeros(16, dtype=torch.uint8), None) is None


def test_zeros_have_signs() -> None:
    module = Module()
    module.history, module.rate = np.array([0.0, 1.0]), 0.0
    copies = Copies(module)
    taken = copies.take()
    module.history[0], module.rate = -0.0, -0.0
    assert copies.take().changed == {"module": {"history", "rate"}}
    copies.put(taken)
    assert not np.signbit(module.history).any()
    assert not np.signbit(module.rate)


# Kinds of state, by what the user's code does to them: a module is changed, put back, changed again, and sent.


class Own:
    """An object of the user's, which refers to the module's parts."""

    me: Any

    def __init__(self, weight: nn.Parameter) -> None:
        self.count, self.weight, self.inner = 0, weight, Slotted()
        self.me = self


class Slotted:
    __slots__ = ("__secret", "later", "n")

    def __init__(self) -> None:
        self.n, self.__secret = 0, [0]

    def change(self) -> None:
        self.n, self.later = self.n + 1, self.n
        self.__secret[0] += 1

    def state(self) -> str:
        return repr((self.n, self.__secret, getattr(self, "later", None)))


@dataclass(frozen=True)
class Frozen:
    n: int
    items: list[int]


class Color(enum.Enum):
    RED = 1
    BLUE = 2


class Log(list[int]):
    """A list with an attribute, and with an append of its own."""

    total = 0

    def append(self, item: int) -> None:
        super().append(item)
        self.total += item


class Named(torch.Tensor):
    """Its `clone` needs an attribute that only its maker sets."""

    label: str

    def clone(self, *args: Any, **kwargs: Any) -> Any:
        made = super().clone(*args, **kwargs)
        made.label = self.label  # type: ignore[attr-defined]
        return made


def named(values: torch.Tensor) -> Named:
    made = values.as_subclass(Named)
    made.label = "x"
    return made


class MyLSTM(nn.LSTM):
    pass


class Zoo(LightningModule):
    net: Any
    by_module: dict[Any, int]
    ordered: OrderedDict[str, Any]
    ema: list[Any]
    plain_list: list[Any]
    partial: Any
    tick: Any
    holder: Any
    rnn: Any

    def __init__(self) -> None:
        super().__init__()
        self.rnn, self.net = MyLSTM(3, 3), nn.Sequential(nn.Linear(2, 2), nn.Dropout(0.5))
        self.decayed = [self.net[0].weight]
        self.by_module = {self.net[0]: 0}
        self.holder = nn.Module()
        self.holder.count = 0
        self.own = Own(self.net[0].weight)
        self.frozen = Frozen(1, [1])
        self.color = Color.RED
        self.log_of, self.shared, self.also = Log(), [1], []
        self.also = [self.shared, self.shared]
        self.codebook, self.table = torch.zeros(100_000), np.zeros(100_000)
        self.history: list[list[int]] = [[] for _ in range(1200)]
        self.ordered = OrderedDict(a=1, b=2)
        self.raw, self.numbers = bytearray(b"ab"), array.array("d", [1.0])
        self.left = iter([1, 2, 3, 4, 5, 6, 7, 8, 9])
        self.pairs = enumerate(iter([1, 2, 3, 4, 5, 6, 7, 8, 9]))
        counted = [0]
        self.tick = lambda: counted.__setitem__(0, counted[0] + 1) or counted[0]
        self.partial = functools.partial(self.net[0].forward, torch.ones(1, 2))
        self.ema = [nn.Linear(2, 2), nn.BatchNorm1d(2)]
        self.named = named(torch.zeros(3))
        self.row = self.codebook[3:5]
        self.plain_list = [torch.zeros(2), None]
        self.dtype_of, self.size = torch.float32, torch.Size([2])
        self.scalar = np.float32(0)

    def change(self) -> None:
        self.holder.count += 1
        self.holder.new = [self.holder.count]
        self.net.steps = getattr(self.net, "steps", 0) + 1
        self.net[1].p *= 0.5
        self.by_module[self.net[0]] += 1
        self.own.count += 1
        self.own.inner.change()
        self.frozen.items.append(2)
        self.color = Color.BLUE
        self.log_of.append(3)
        self.shared.append(2)
        self.codebook.data.add_(1)
        self.table[5] += 1
        self.history[7].append(1)
        self.ordered.move_to_end("a")
        self.ordered["c"] = self.own
        self.raw += b"c"
        self.numbers.append(2.0)
        next(self.left)
        next(self.pairs)
        self.tick()
        self.ema[0].weight.data.mul_(0.5)
        self.ema[1].running_mean.add_(1)
        self.named.data.add_(1)
        self.plain_list[0].numpy()[:] += 1
        self.plain_list[1] = self.net[0]
        self.dtype_of, self.size = torch.float64, torch.Size([3, 1])
        self.scalar = np.float32(self.scalar + 1)

    def state(self) -> dict[str, Any]:
        names = "frozen color log_of shared also raw numbers dtype_of size scalar"
        found: dict[str, Any] = {name: repr(getattr(self, name)) for name in names.split()}
        found |= {"holder": repr(self.holder.count), "new": repr(getattr(self.holder, "new", None))}
        found |= {
            "net": (getattr(self.net, "steps", 0), self.net[1].p),
            "own": (self.own.count, self.own.inner.state()),
        }
        found |= {"by_module": list(self.by_module.values()), "total": self.log_of.total}
        found |= {"tensors": [float(each.sum()) for each in (self.codebook, self.named, self.row)]}
        found |= {"table": float(self.table.sum()), "history": repr(self.history[7]), "ordered": list(self.ordered)}
        found |= {"ema": [float(self.ema[0].weight.detach().sum()), float(self.ema[1].running_mean.sum())]}
        found |= {"left": repr(copy.copy(self.left).__reduce__()), "pairs": self.pairs.__reduce__()[1][1]}
        found |= {"tick": repr(self.tick.__closure__[0].cell_contents), "list": float(self.plain_list[0].sum())}
        return found

    def aliases(self) -> list[bool]:
        return [
            *[
                each is getattr(self.rnn, name)
                for each, name in zip(self.rnn._flat_weights, self.rnn._flat_weights_names, strict=True)
            ],
            self.decayed[0] is self.net[0].weight,
            self.own.weight is self.net[0].weight,
            self.own.me is self.own,
            self.also[0] is self.shared and self.also[1] is self.shared,
            next(iter(self.by_module)) is self.net[0],
            self.ordered.get("c", self.own) is self.own,
            self.plain_list[1] in (None, self.net[0]),
            self.row.data_ptr() == self.codebook[3:].data_ptr(),
            self.partial.func.__self__ is self.net[0],
            type(self.log_of) is Log,
            type(self.named) is Named,
        ]


@pytest.fixture(autouse=True)
def seeded() -> None:
    torch.manual_seed(1)


@pytest.mark.parametrize("before", [0, 1, 5])
def test_every_kind_goes_back(before: int) -> None:
    module = Zoo()
    copies = Copies(module)
    for _ in range(before):
        module.change()
        copies.take()
    taken, was = copies.take(), module.state()
    for _ in range(2):
        module.change()
        same = {name for name, value in module.state().items() if value == was[name]}
        assert same <= ({"color", "dtype_of", "size", "ordered"} if before else set())
        copies.put(taken)
        assert module.state() == was
        assert all(module.aliases()), module.aliases()
    assert copies.inexact.known == {}


@pytest.mark.parametrize("part", ["whole", "private"])
def test_every_kind_is_sent(part: str) -> None:
    module = Zoo()
    copies = Copies(module)
    module.change()
    module.change()
    taken, was = copies.take(), module.state()
    sent = copies.whole(taken) if part == "whole" else copies.private(taken)
    module.change()  # what is sent is what it was
    fresh = Zoo()
    found = put_sent(fresh, sent)
    reported = {*copies.inexact.known, *found.inexact.known}
    now = fresh.state()
    different = {name for name in was if now[name] != was[name]}
    assert different == ({"history"} if part == "private" else set())
    assert reported == ({"module.history"} if part == "private" else set())
    assert all(fresh.aliases()), fresh.aliases()


class Counts(Callback):
    def __init__(self) -> None:
        self.seen: list[int] = []
        self.model: Any = None


class Sees(RecoveryCallback):
    count = 0


class Data(LightningDataModule):
    def __init__(self) -> None:
        super().__init__()
        self.served = 0


def test_callbacks_and_the_data_module() -> None:
    def make() -> tuple[Module, Counts, Sees, Timer, Data]:
        return Module(), Counts(), Sees(), Timer(), Data()

    module, counts, sees, timer, data = make()
    copies = Copies(module, counts, sees, timer, data=data)
    taken = copies.take()
    counts.seen.append(1)
    counts.model, sees.count, timer._offset, data.served = module, 1, 7, 3
    later = copies.take()
    sent = copies.private(later)
    copies.put(taken)
    assert (counts.seen, counts.model, data.served) == ([], None, 0)
    assert (sees.count, timer._offset) == (1, 7)  # it remembers recoveries; Lightning's own have a state_dict
    module, counts, sees, timer, data = make()
    fresh = Copies(module, counts, sees, timer, data=data)
    fresh.reachable.put_sent(plain.unpack(plain.pack(sent)))
    assert (counts.seen, counts.model, data.served, sees.count) == ([1], module, 3, 0)


def test_what_cannot_be_restored_is_named_once(caplog: pytest.LogCaptureFixture, tmp_path: Path) -> None:
    module: Any = Module()
    module.tokens = (n for n in range(10))
    with (tmp_path / "file").open("w") as module.file:
        copies = Copies(module)
        copies.take()
        assert copies.inexact.known == {}
        for _ in range(3):
            next(module.tokens)
            module.file.write("x")
            copies.take()
    assert set(copies.inexact.known) == {"module.tokens", "module.file"}
    assert [record.getMessage().split(": ")[:2] for record in caplog.records] == [
        ["Not exact after a fault", "module.tokens"],
        ["Not exact after a fault", "module.file"],
    ]


def test_a_large_tensor_that_changes_late_is_named() -> None:
    module: Any = Module()
    module.bank, module.masks = torch.zeros(3_000_000), torch.zeros(3_000_000)
    copies = Copies(module)
    for _ in range(10):
        copies.take()
    module.bank.data[2_000_000] += 1
    steps = 0
    while "module.bank" not in copies.inexact.known:
        copies.take()
        steps += 1
        assert steps < 100
    taken = copies.take()
    module.bank.data[5] = 3
    copies.put(taken)  # from now on, it is exact
    assert float(module.bank.sum()) == 1
    assert list(copies.inexact.known) == ["module.bank"]


def test_an_item_deep_in_a_large_container_that_changes_late_is_named() -> None:
    module: Any = Module()
    module.samples = [{"n": 0} for _ in range(5000)]
    copies = Copies(module)
    for _ in range(10):
        copies.take()
    module.samples[4321]["n"] = 1
    steps = 0
    while "module.samples" not in copies.inexact.known:
        copies.take()
        steps += 1
        assert steps < 100
    taken = copies.take()
    module.samples[17]["n"] = 1
    copies.put(taken)
    assert [n for n, each in enumerate(module.samples) if each["n"]] == [4321]


def test_what_is_replaced_in_every_step_is_not_kept() -> None:
    module: Any = Module()
    copies = Copies(module)
    alive: list[weakref.ref[Any]] = []
    for _ in range(200):
        module.hidden = torch.zeros(1000)
        alive.append(weakref.ref(module.hidden))
        copies.take()
    assert sum(each() is not None for each in alive) < 50


def test_an_object_that_runs_is_left_alone() -> None:
    module: Any = Module()
    module.worker = SimpleNamespace(thread=threading.Thread(target=print), jobs=deque([1]))
    copies = Copies(module)
    taken = copies.take()
    module.worker.jobs.append(2)
    copies.put(taken)
    assert list(module.worker.jobs) == [1, 2]
    assert copies.inexact.known["module.worker"].scope == "unknown"


def signature(module: LightningModule, contents: bool = True) -> Signature:
    taken = Copies(module).take()
    return signature_of(taken.capture, taken.anchors, contents)


def test_equal_objects_have_equal_signatures_and_each_change_is_found() -> None:
    first = Zoo()
    torch.manual_seed(1)
    second = Zoo()
    for each in (first, second):
        each.change()
    assert differences(signature(first), signature(second)) == []
    before = signature(first)
    first.own.inner.change()
    first.table[7] += 1
    first.left.__next__()
    first.also[1] = [1, 2]  # equal, and another object
    first.net[1].p = 0.3
    assert set(differences(before, signature(first))) == {
        "module.own",
        "module.ordered",  # which refers to the same object
        "module.table",
        "module.left",
        "module.also",
        "module.net.1.p",
    }
    assert differences(signature(second, contents=False), signature(first, contents=False)) == ["module.also"]


def test_a_replacement_that_refers_to_something_else_is_told() -> None:
    module, fresh = Zoo(), Zoo()
    copies, others = Copies(module), Copies(fresh)
    sent = copies.reachable.signature(copies.take())
    others.reachable.compare(others.take(), sent)
    assert others.inexact.known == {}
    fresh.rnn._flat_weights = [nn.Parameter(each.detach().clone()) for each in fresh.rnn._flat_weights]
    others = Copies(fresh)
    others.reachable.compare(others.take(), sent)
    assert set(others.inexact.known) == {"module.rnn._flat_weights"}


def test_a_digest_of_batches_of_any_class() -> None:
    def batch(value: float) -> Any:
        return SimpleNamespace(x=torch.tensor([value]), edges=[(1, 2)])

    assert digest_of(batch(1.0)) == digest_of(batch(1.0))
    assert digest_of(batch(1.0)) != digest_of(batch(2.0))


class Plans(LightningModule):
    """Values that cannot change, of all kinds, and functions."""

    def __init__(self) -> None:
        super().__init__()
        self.values: list[Any] = [Path("a"), int, datetime.date(2026, 1, 1), torch.relu, Color.RED, np.float32(1)]

    def change(self) -> None:
        self.values[:] = [Path("b/c"), int, datetime.date(2026, 1, 1), torch.relu, Color.BLUE, np.float32(2)]


def test_values_that_cannot_change_are_sent_or_told() -> None:
    module, fresh = Plans(), Plans()
    copies = Copies(module)
    module.change()
    found = put_sent(fresh, copies.private())
    assert fresh.values == module.values
    assert found.inexact.known == {}
    module.values[1], module.values[2] = str, datetime.date(2026, 1, 2)
    assert put_sent(fresh, copies.private()).inexact.known == {}
    assert fresh.values == module.values
    module.values[2] = np.maximum
    assert set(put_sent(fresh, copies.private()).inexact.known) == {"module.values[2]"}


@pytest.mark.parametrize("sent", [["dtype", "save"], ["enum", "builtins:int", "real"], ["enum", "no:such", "a"]])
def test_names_from_outside_are_checked(sent: list[Any]) -> None:
    module = Module()
    found = put_sent(module, [["module", [["count", sent]]]]).inexact.known
    assert re.search(r"TransferError: .* is (not a dtype|no enumeration)", found["module.count"].why)
    assert module.count == Module().count


class Scaled(torch.Tensor):
    """A tensor that stands in front of two others, as a quantized one."""

    codes: torch.Tensor
    scale: torch.Tensor

    @staticmethod
    def __new__(cls, values: torch.Tensor, scale: torch.Tensor) -> Any:
        made = torch.Tensor._make_wrapper_subclass(cls, values.shape, dtype=scale.dtype)
        made.codes, made.scale = values, scale
        return made

    def __tensor_flatten__(self) -> tuple[list[str], None]:
        return ["codes", "scale"], None

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        raise NotImplementedError(f"{function} is not to be called")


def test_a_tensor_that_consists_of_others_goes_back() -> None:
    module: Any = Module()
    module.packed = Scaled(torch.ones(3, dtype=torch.int8), torch.ones(1))
    copies = Copies(module)
    taken = copies.take()
    module.packed.codes.data.zero_()
    module.packed.scale.mul_(2)
    copies.put(taken)
    assert module.packed.codes.tolist() == [1, 1, 1]
    assert module.packed.scale.tolist() == [1]
    assert copies.inexact.known == {}


def test_a_tensor_of_unknown_layout_that_is_written_to_is_named() -> None:
    module: Any = Module()
    module.graph = torch.eye(2).to_sparse()
    copies = Copies(module)
    copies.take()
    assert copies.inexact.known == {}
    module.graph.mul_(2)
    copies.take()
    assert set(copies.inexact.known) == {"module.graph"}


@pytest.mark.parametrize("moves", [False, True], ids=["unchanged", "moved on"])
def test_an_iterator_that_two_attributes_refer_to(moves: bool) -> None:
    """One of them has not changed, and is not sent."""

    def made() -> Any:
        module: Any = LightningModule()
        module.first, module.second = iter([1, 2, 3, 4]), []
        return module

    module = made()
    copies = Copies(module)
    module.second = [module.first]
    if moves:
        next(module.first)
    sent = copies.private()
    fresh = made()
    put_sent(fresh, sent)
    assert fresh.second[0] is fresh.first
    assert next(fresh.first) == 1 + moves


class OwnTuple(tuple[Any, ...]):
    """As the irreducible representations of e3nn: what it contains is nobody's business."""

    def __new__(cls, degree: int, parity: list[int]) -> "OwnTuple":
        return super().__new__(cls, (degree, parity))

    def __len__(self) -> int:
        raise NotImplementedError

    def __iter__(self) -> Any:
        raise NotImplementedError


class OwnItems(list[Any]):
    def __len__(self) -> int:
        return 0

    def __iter__(self) -> Any:
        return iter([])


class OwnMembers(set[Any]):
    def __len__(self) -> int:
        return 0

    def __iter__(self) -> Any:
        return iter([])

    def __contains__(self, item: object) -> bool:
        return True


def test_containers_whose_methods_say_something_else() -> None:
    def made() -> Any:
        module: Any = LightningModule()
        module.tuple, module.list, module.set = OwnTuple(1, [0]), OwnItems([1, [2]]), OwnMembers({3})
        return module

    module = made()
    copies = Copies(module)

    def change(number: int) -> None:
        tuple.__getitem__(module.tuple, 1).append(number)
        list.__getitem__(module.list, 1).append(number)
        list.append(module.list, number)
        set.add(module.set, number)

    def held(of: Any) -> list[Any]:
        return [list(tuple.__iter__(of.tuple)), list(list.__iter__(of.list)), sorted(set.__iter__(of.set))]

    change(5)
    taken, was = copies.take(), copy.deepcopy(held(module))
    sent = copies.private(taken)
    change(6)
    copies.put(taken)
    assert held(module) == was == [[1, [0, 5]], [1, [2, 5], 5], [3, 5]]
    fresh = made()
    put_sent(fresh, sent)
    assert held(fresh) == was
    assert type(fresh.tuple) is OwnTuple


class Refers(Callback):
    """As schnetpack's ModelCheckpoint and torch_ema's averages: it keeps the module, and weak references."""

    def __init__(self) -> None:
        self.task: Any = None
        self.references: list[Any] = []
        self.gone: Any = None


def test_references_to_what_has_a_name() -> None:
    def made() -> tuple[Any, Refers]:
        module: Any = LightningModule()
        module.layer, module.table = nn.Linear(2, 2), list(range(5000))
        return module, Refers()

    module, callback = made()
    copies = Copies(module, callback)
    callback.task = module
    callback.references = [weakref.ref(each) for each in module.parameters()]
    callback.gone = weakref.ref(nn.Linear(1, 1))
    taken = copies.take()
    assert taken.changed == {"callback 0 (Refers)": frozenset(("task", "references", "gone"))}
    sent = plain.unpack(plain.pack(copies.private(taken)))
    fresh, other = made()
    found = Copies(fresh, other)
    found.reachable.put_sent(sent)
    assert other.task is fresh
    assert [each() for each in other.references] == [*fresh.parameters()]
    assert other.gone() is None
    module.layer.note = [1]
    assert copies.take().changed["callback 0 (Refers)"] == frozenset(("task", "references", "gone"))
    assert copies.inexact.known == found.inexact.known == {}


class Refused(ValueError):
    """Its fields lie in C."""


def suppressing(error: BaseException) -> list[bool]:
    return [error.__suppress_context__, error.__cause__ is None, error.__context__ is None]


class KeepsExceptions(LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.last: Any = ValueError("", 0)
        self.of_system = OSError(2, "no", "a")
        self.made: Any = None
        self.seen: list[Any] = []

    def advance(self) -> list[Any]:
        self.last.args = (self.last.args[0] + "x", len(self.seen))
        self.of_system.errno = len(self.seen)
        try:
            raise Refused(len(self.seen)) from self.last
        except Refused as error:
            self.seen.append(error)
        found = [[*each.args, each.__cause__ is self.last, str(each), *suppressing(each)] for each in self.seen]
        try:
            _ = threading.Thread().missing  # type: ignore[attr-defined]
        except AttributeError as error:
            self.lacks = error
        made = TimeoutError("slow"), FileNotFoundError(2, "no", "a"), UnicodeDecodeError("utf-8", b"a", 0, 1, "no")
        texts = [(str(each), *suppressing(each)) for each in self.made or ()]
        self.made = made
        return [*found, self.last.args, self.of_system.errno, self.of_system.filename, *texts]


def test_exceptions() -> None:
    module, other = KeepsExceptions(), KeepsExceptions()
    copies, expected = done_again(module)
    replaced = put_sent(other, copies.private())
    assert other.advance() == module.advance() != expected[-1]
    assert not {**copies.inexact.known, **replaced.inexact.known}


class Delegates:
    """Asks another object for all that it lacks, as files of `tempfile` do."""

    def __init__(self, turn: int) -> None:
        self.inner, self.turn = [turn], turn

    def __getattr__(self, name: str) -> Any:
        return getattr(self.__dict__["inner"], name)


class KeepsDelegates(LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.made: Any = None

    def advance(self) -> Any:
        self.made = Delegates(1 if self.made is None else self.made.turn + 1)
        return self.made.turn, self.made.count(self.made.turn)


def test_an_object_that_asks_another_one_for_all_that_it_lacks() -> None:
    module, other = KeepsDelegates(), KeepsDelegates()
    copies = Copies(module)
    copies.take()
    module.advance()
    replaced = put_sent(other, copies.private())
    assert other.advance() == module.advance() == (2, 1)
    assert not {**copies.inexact.known, **replaced.inexact.known}


def test_a_partial_is_looked_at_without_a_trace() -> None:
    """Python joins a partial of a partial only if the inner one has no attributes, not even an empty dict of them."""
    module: Any = LightningModule()
    module.inner = functools.partial(pow, exp=2)
    copies = Copies(module)
    copies.put(copies.take())
    assert functools.partial(module.inner, mod=3).keywords == {"exp": 2, "mod": 3}
    module.inner.note = 1
    taken = copies.take()
    module.inner.note = 2
    copies.put(taken)
    assert module.inner.note == 1


def test_a_run_that_resumes_has_the_settings_of_its_script() -> None:
    stopping = EarlyStopping("loss", patience=1)
    copies = Copies(LightningModule(), stopping)
    trainer: Any = copies.reachable._trainer
    trainer.limit_val_batches = 1.0
    copies.reachable.begin_to_save(copies.take())
    trainer.limit_val_batches, trainer.own, stopping.patience = 3, 7, 9
    trainer.callbacks.append(stopping)
    saved = copies.reachable.saved(copies.take())
    assert [(root, [name for name, _ in pairs]) for root, pairs in saved] == [("trainer", ["own"])]
    assert sorted(copies.inexact.known) == [
        "EarlyStopping 0.patience",
        "trainer.callbacks",
        "trainer.limit_val_batches",
    ]
