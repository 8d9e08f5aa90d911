"""Plain attributes of a module: which are taken, how they are put back, what may travel."""

import json
from collections import Counter, defaultdict

import torch
from lightning.pytorch import LightningModule

from lightning_replica import attributes


class Module(LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.count, self.rate, self.raised = 1, 0.5, False
        self.outputs: list[object] = [torch.ones(2)]
        self.by_name = {"a": [1, 2]}
        self.seen = {3}
        self.other = object()


def test_counters_and_containers_go_back_and_flags_stay() -> None:
    module = Module()
    outputs = module.outputs
    taken = attributes.take(module)
    assert set(taken) == {"count", "rate", "outputs", "by_name", "seen"}
    module.count, module.raised = 7, True
    module.outputs.append(torch.zeros(1))
    module.by_name["a"].append(3)
    module.seen.clear()
    attributes.put(module, taken)
    assert (module.count, module.raised, module.by_name, module.seen) == (1, True, {"a": [1, 2]}, {3})
    assert module.outputs is outputs  # whoever else holds the list sees it
    assert len(outputs) == 1


def test_a_snapshot_is_put_back_any_number_of_times() -> None:
    module = Module()
    taken = attributes.take(module)
    for _ in range(2):
        module.by_name["a"].append(9)
        attributes.put(module, taken)
        assert module.by_name == {"a": [1, 2]}


def test_what_travels_is_plain() -> None:
    module = Module()
    module.mixed = [object()]
    assert set(attributes.plain(attributes.take(module))) == {"count", "rate", "outputs", "by_name"}


class WithHyperparameters(LightningModule):
    def __init__(self, lr: float = 0.1) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.counted = Counter("aab")
        self.lists: defaultdict[str, list[int]] = defaultdict(list, a=[1])


def test_containers_stay_what_they_are() -> None:
    """Hyperparameters are read as attributes, missing keys of a Counter and a defaultdict are made: no plain dicts."""
    module = WithHyperparameters()
    hparams = module.hparams
    taken = attributes.take(module)
    names = ("_hparams", "counted", "lists")
    travelled = json.loads(json.dumps(attributes.plain({name: taken[name] for name in names})))
    for saved in (taken, travelled):
        module.hparams.lr = 0.2
        module.counted["c"] += 1
        module.lists["b"].append(2)
        attributes.put(module, saved)
        assert module.hparams is hparams
        assert module.hparams.lr == 0.1
        assert module.counted["z"] == 0
        assert (dict(module.counted), dict(module.lists)) == ({"a": 2, "b": 1}, {"a": [1]})
        module.lists["new"].append(3)
