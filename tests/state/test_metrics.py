"""Metrics under way come back where the module is, wherever they come from."""

import lightning as L
import torch
from torchmetrics import MeanMetric
from torchmetrics.classification import MulticlassAccuracy

from lightning_replica._compat.lightning_names import _ResultCollection
from lightning_replica._compat.tree import Tree
from lightning_replica.core import plain
from lightning_replica.state import metrics


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
    states = plain.unpack(plain.pack(metrics.copy_states(Tree.of(module))))

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
    (state,) = metrics.copy_states(Tree.of(metric))
    assert {*state} == {*metric._defaults, "_update_count", "_computed"}
