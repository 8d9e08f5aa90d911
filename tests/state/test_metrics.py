"""Metrics under way come back where the module is, wherever they come from."""

from typing import Any

import lightning as L
import pytest
import torch
from torchmetrics import CatMetric, MeanMetric, RunningMean
from torchmetrics.classification import BinaryAUROC, MulticlassAccuracy

from lightning_replica._compat.lightning_names import _ResultCollection
from lightning_replica._compat.tree import Tree
from lightning_replica.core import plain
from lightning_replica.core.inexact import Inexact
from lightning_replica.state import metrics
from lightning_replica.state.metrics import CopiedList, MetricStates, as_lists, pack_states, unpack_states


class Module(L.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.mean = MeanMetric()


def test_they_come_back_on_the_modules_device() -> None:
    """As from a peer: packed, and so on the host."""
    module, results = Module(), _ResultCollection(training=True)
    results.log("training_step", "loss", torch.tensor(2.5), on_step=True, on_epoch=True, batch_size=4)
    module.mean.update(torch.tensor(3.0))
    exported = plain.unpack(plain.pack(metrics.export_results(results)))
    states = plain.unpack(plain.pack(metrics.MetricStates().copy(Tree.of(module))))

    module.to("meta")  # a device whose tensors cannot be mistaken for the host's
    restored = _ResultCollection(training=True)
    metrics.import_results(restored, exported, lambda value, *_: value, module)
    metrics.put_states(module.modules(), states)
    value = restored["training_step.loss"]
    assert value.value.device == value.cumulated_batch_size.device == torch.device("meta")
    assert module.mean.mean_value.device == torch.device("meta")

    module = Module()
    metrics.import_results(restored, exported, lambda value, *_: value, module)
    metrics.put_states(module.modules(), states)
    assert restored["training_step.loss"].value.item() == 10.0  # weighted by the batch size
    assert module.mean.compute().item() == 3.0


def test_settings_of_a_metric_are_no_state() -> None:
    """They would come back with a checkpoint, over what the script has chosen since."""
    metric = MulticlassAccuracy(num_classes=3, top_k=2)
    (state,) = metrics.MetricStates().copy(Tree.of(metric))
    assert {*state} == {*metric._defaults, "_update_count", "_computed"}


def same(one: Any, other: Any) -> bool:
    return len(one) == len(other) and all(map(torch.equal, one, other))


def test_of_long_lists_only_what_is_new_is_copied_and_packed() -> None:
    metric, states = BinaryAUROC(), MetricStates()
    tree = Tree.of(metric)
    former: tuple[Any, Any, Any] = ((), (), ())
    for number in range(300):
        if number == 150:
            metric.reset()
        elif number == 220:
            metric.preds[5].mul_(0.5)
        elif number == 240:
            del metric.preds[70:]
        metric.update(torch.rand(4), torch.randint(2, (4,)))
        (state,) = taken = states.copy(tree)
        packed = pack_states(taken, dict)
        (back,) = unpack_states(bytes(packed))
        assert all(same(found[name], getattr(metric, name)) for found in (state, back) for name in ("preds", "target"))
        if number % 150 > 70 and number not in (220, 240):
            before, values, pieces = former
            assert all(a is b for a, b in zip(state["preds"], values, strict=False))
            assert len({*map(id, packed.parts)} - {*map(id, pieces)}) <= 6  # text, and the ends of two lists
            assert same(before["preds"], values)
        former = dict(state), list(state["preds"]), packed.parts
    assert not any(isinstance(value, CopiedList) for value in as_lists(taken)[0].values())


class Own(CatMetric):
    """Its code may write in any way."""


def test_lists_of_a_metric_of_the_users_are_copied_anew() -> None:
    metric, states = Own(), MetricStates()
    for number in range(100):
        metric.update(torch.tensor(float(number)))
    states.copy(Tree.of(metric))
    metric.value[3].data.fill_(7)
    (state,) = states.copy(Tree.of(metric))
    assert state["value"][3] == 7


def test_what_is_written_without_a_word_is_found_in_its_turn() -> None:
    metric, inexact = BinaryAUROC(), Inexact()
    states, tree = MetricStates(inexact.report), Tree.of(metric)
    for _ in range(100):
        metric.update(torch.rand(4), torch.randint(2, (4,)))
    states.copy(tree)
    metric.preds[3].data.fill_(7)
    for _ in range(13):
        (state,) = states.copy(tree)
    assert state["preds"][3].tolist() == [7] * 4
    assert [*inexact.known] == ["BinaryAUROC.preds"]


@pytest.mark.filterwarnings("ignore:The ``compute`` method of metric MeanMetric")  # `RunningMean` always gives it
def test_states_that_begin_as_one_object_get_their_own_contents() -> None:
    """`RunningMean` has one tensor for all of its window, and as its default, until it is updated."""
    metric, other = RunningMean(window=3), RunningMean(window=3)
    for value in (1.0, 2.0, 3.0, 4.0):
        metric.update(value)
    states = unpack_states(bytes(pack_states(MetricStates().copy(Tree.of(metric)), dict)))
    metrics.put_states(other.modules(), states)
    assert other.compute() == metric.compute() == 3.0
    other.reset()
    other.update(5.0)
    assert other.compute() == 5.0
