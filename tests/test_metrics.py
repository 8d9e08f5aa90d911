"""Metrics under way come back where the module is, wherever they come from."""

import lightning as L
import torch
from torchmetrics import MeanMetric, MinMaxMetric

from lightning_replica import metrics, plain
from lightning_replica._compat.lightning import _ResultCollection


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
    states = plain.unpack(plain.pack(metrics.copy_states(module.modules())))

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


def test_what_a_metric_keeps_beside_its_states_comes_back_too() -> None:
    """`MinMaxMetric` has its extremes in plain attributes."""
    metric = MinMaxMetric(MeanMetric())
    for value in (3.0, 1.0, 2.0):
        metric.update(torch.tensor(value))
        metric.compute()
        metric.reset()
    states = plain.unpack(plain.pack(metrics.copy_states(metric.modules())))
    metric.update(torch.tensor(0.0))
    metric.compute()
    for changed in (metric, MinMaxMetric(MeanMetric())):
        metrics.put_states(changed.modules(), states)
        assert (float(changed.min_val), float(changed.max_val)) == (1.0, 3.0)
