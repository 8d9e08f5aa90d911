"""Plain attributes of a module and what it consists of: which are taken, how they are put back, what travels."""

import random
from collections import Counter, defaultdict, deque, namedtuple
from typing import Any

import numpy as np
import pytest
import torch
from lightning.pytorch import LightningModule
from torch import nn
from torch.nn.utils import prune
from torchmetrics import MeanMetric, MinMaxMetric

from lightning_replica._compat.tree import Tree
from lightning_replica.core import plain
from lightning_replica.errors import RecoveryError
from lightning_replica.state import attributes
from lightning_replica.state.attributes import Copies
from lightning_replica.state.attributes.plain_form import _generator
from tests.support.typed import tensor_of

Pair = namedtuple("Pair", "a b")


class Cell(nn.Linear):
    """Of the user's own class, with state of its own."""

    def __init__(self) -> None:
        super().__init__(2, 2)
        self.calls, self.begun = 0, False
        self.last: torch.Tensor | None = None


class Module(LightningModule):
    late: int
    mixed: list[object]

    def __init__(self) -> None:
        super().__init__()
        self.count, self.rate, self.begun = 1, 0.5, False
        self.hidden: Any = None
        self.outputs: list[Any] = [torch.ones(2)]
        self.by_name: dict[str, list[Any]] = {"a": [1, 2]}
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


def take(module: Module, copies: Copies | None = None) -> attributes.Taken:
    return (copies or Copies(module)).take(Tree.of(module))


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
        attributes.put(list(module.modules()), taken)
        assert state(module) == before
        assert hasattr(module, "late") == trained
        assert module.outputs is outputs  # whoever else holds it sees it
        assert module.mean is mean
        numbers = numbers or drawn(module)
        attributes.put(list(module.modules()), taken)
        assert drawn(module) == numbers


def test_what_is_not_state_stays() -> None:
    module = Module()
    taken, other, weight = take(module), module.other, module.plain.weight
    module.other, changed = object(), torch.ones(2, 2)
    with torch.no_grad():
        weight.copy_(changed)
    attributes.put(list(module.modules()), taken)
    assert module.other is not other
    assert module.mine[0] is weight
    assert torch.equal(weight, changed)  # parameters are put back by others


def test_a_replacement_gets_all_of_it() -> None:
    module = Module()
    copies = Copies(module)
    train(module)
    taken = take(module, copies)
    numbers = drawn(module)
    for sent in (taken.private(), taken.whole()):
        fresh = Module()
        attributes.put_plain(list(fresh.modules()), plain.unpack(plain.pack(sent)))
        assert state(fresh) == state(module)
        assert isinstance(fresh.pair, Pair)
        assert fresh.recent.maxlen == 2
        assert fresh.mine[0] is not None
        assert fresh.late == 3
        assert drawn(fresh) == numbers


def test_only_what_has_changed_is_mirrored() -> None:
    module = Module()
    copies = Copies(module)
    assert take(module, copies).private() == []
    module.cell.calls += 1
    assert take(module, copies).private() == [[1, [["calls", 1]]]]
    module.mean.add_(1)
    (_, values), _ = take(module, copies).private()
    assert [name for name, _ in values] == ["mean"]


def test_where_a_checkpoint_may_have_set_attributes_all_are_mirrored() -> None:
    class Loads(Module):
        def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
            self.count = checkpoint["count"]

    module = Loads()
    (number, values), *_ = take(module).private()
    assert number == 0
    assert ["count", 1] in values


def test_large_attributes_are_not_mirrored_but_a_peer_has_them() -> None:
    module = Module()
    copies = Copies(module)
    module.outputs = [torch.ones(2**20), torch.ones(2**10)]
    module.by_name = {"many": list(range(5000))}
    taken = take(module, copies)
    assert taken.private() == []
    fresh = Module()
    attributes.put_plain(list(fresh.modules()), taken.whole())
    assert [t.numel() for t in fresh.outputs] == [2**20, 2**10]
    assert fresh.by_name == module.by_name
    module.outputs.append(torch.ones(1))
    module.by_name["many"].pop()
    attributes.put(list(module.modules()), taken)
    assert (len(module.outputs), len(module.by_name["many"])) == (2, 5000)


def test_a_large_list_whose_tensors_are_written_to_is_not_put_back_wrongly() -> None:
    module = Module()
    module.outputs = [torch.ones(2**20), torch.ones(2**10)]
    taken = take(module)
    module.outputs[1].zero_()
    with pytest.raises(RecoveryError, match="'outputs' is a list of more than 4 MiB"):
        attributes.put(list(module.modules()), taken)


def test_a_tensor_is_copied_once() -> None:
    module = Module()
    copies = Copies(module)
    first, second = take(module, copies), take(module, copies)
    assert first.values[0]["mean"] is second.values[0]["mean"]
    module.mean.add_(1)
    assert take(module, copies).values[0]["mean"] is not first.values[0]["mean"]


def test_what_another_rank_cannot_have_stays_as_it_was_built() -> None:
    module = Module()
    copies = Copies(module)
    module.mixed = [object()]
    module.count = 2
    assert take(module, copies).private() == [[0, [["count", 2]]]]


def test_a_container_that_contains_itself() -> None:
    module = Module()
    module.by_name["a"] = [module.by_name]
    taken = take(module)
    attributes.put(list(module.modules()), taken)
    assert module.by_name["a"][0] is module.by_name


class WithHyperparameters(LightningModule):
    def __init__(self, lr: float = 0.1) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.counted = Counter("aab")
        self.lists: defaultdict[str, list[int]] = defaultdict(list, a=[1])


@pytest.mark.parametrize("travels", [False, True])
def test_containers_stay_what_they_are(travels: bool) -> None:
    """Hyperparameters are read as attributes, missing keys of a Counter and a defaultdict are made: no plain dicts."""
    module = WithHyperparameters()
    hparams: Any = module.hparams
    taken = Copies(module).take(Tree.of(module))
    sent = taken.whole()
    hparams.lr = 0.2
    module.counted["c"] += 1
    module.lists["b"].append(2)
    if travels:
        attributes.put_plain([module], sent)
    else:
        attributes.put([module], taken)
    assert hparams.lr == 0.1
    assert module.hparams is hparams
    assert module.counted["z"] == 0
    assert (dict(module.counted), dict(module.lists)) == ({"a": 2, "b": 1}, {"a": [1]})
    module.lists["new"].append(3)


def test_a_pruned_weight_goes_back() -> None:
    """It is a plain attribute of torch's own module, made anew in each forward; the next pruning looks at it."""
    module = Module()
    copies = Copies(module)
    prune.l1_unstructured(module.plain, "weight", 0.5)
    taken = take(module, copies)
    weight = module.plain.weight.detach().clone()
    tensor_of(module.plain.weight_orig).data.add_(1)
    module.plain(torch.ones(1, 2))
    attributes.put(list(module.modules()), taken)
    assert torch.equal(module.plain.weight, weight)
    fresh = Module()
    prune.l1_unstructured(fresh.plain, "weight", 0.5)
    attributes.put_plain(list(fresh.modules()), plain.unpack(plain.pack(taken.private())))
    assert torch.equal(fresh.plain.weight, weight)


@pytest.mark.parametrize("kind", ["parameter", "buffer", "submodule"])
def test_what_is_registered_is_not_written_over(kind: str) -> None:
    """A plain attribute that has become a parameter of that name since, or was one only on another rank."""
    module: Any = LightningModule()
    module.weight = 3
    taken = attributes.Copies(module).take(Tree.of(module))
    del module.weight
    made: Any = {"parameter": nn.Parameter(torch.ones(1)), "buffer": nn.Buffer(torch.ones(1)), "submodule": nn.ReLU()}
    module.weight = made[kind]
    attributes.put([module], taken)
    attributes.put_plain([module], taken.whole())
    assert module.weight is made[kind]


def test_what_a_metric_keeps_beside_its_states() -> None:
    """`MinMaxMetric` has its extremes in plain attributes. Declared states are put back by state/metrics.py."""

    class Measured(LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.extremes: Any = MinMaxMetric(MeanMetric())

    module = Measured()
    modules, copies, metric = list(module.modules()), Copies(module), module.extremes
    for value in (3.0, 1.0, 2.0):
        metric.update(torch.tensor(value))
        metric.compute()
        metric.reset()
    taken = copies.take(Tree.of(module))
    sent = plain.unpack(plain.pack(taken.private()))
    metric.update(torch.tensor(0.0))
    metric.compute()
    attributes.put(modules, taken)
    assert (float(metric.min_val), float(metric.max_val)) == (1.0, 3.0)
    assert metric._base_metric.weight == 1.0
    fresh = Measured()
    attributes.put_plain(list(fresh.modules()), sent)
    assert (float(fresh.extremes.min_val), float(fresh.extremes.max_val)) == (1.0, 3.0)


def test_a_tensor_that_cannot_travel_stays_as_it_was_built() -> None:
    module = Module()
    copies = Copies(module)
    module.hidden = torch.eye(2).to_sparse()
    module.count = 2
    taken = take(module, copies)
    assert plain.unpack(plain.pack(taken.private())) == [[0, [["count", 2]]]]
    module.hidden = None
    attributes.put(list(module.modules()), taken)
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
    copies.take(Tree.of(module))
    module.begin()
    sent = copies.take(Tree.of(module)).private()
    attributes.put_plain(list(other.modules()), plain.unpack(plain.pack(sent)))
    # The objects stay: whoever else holds one draws from it.
    assert all(now is before for now, before in zip(other.listed, listed, strict=True))
    assert other.draw() == module.draw()


def test_the_state_of_a_generator_that_cannot_be_here_is_left_out() -> None:
    """A generator on a GPU has a state of 16 bytes. In a process without GPU, nothing can take it."""
    here = torch.Generator().manual_seed(3)
    state = here.get_state()
    assert _generator(torch.zeros(16, dtype=torch.uint8), here) is here
    assert torch.equal(here.get_state(), state)
    assert _generator(torch.zeros(16, dtype=torch.uint8), None) is None


def test_zeros_have_signs() -> None:
    module = Module()
    module.history, module.rate = np.array([0.0, 1.0]), 0.0
    copies = Copies(module)
    taken = take(module, copies)
    module.history[0], module.rate = -0.0, -0.0
    assert take(module, copies).changed
    attributes.put(list(module.modules()), taken)
    assert not np.signbit(module.history).any()
    assert not np.signbit(module.rate)
