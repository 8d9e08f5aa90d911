"""torchmetrics everywhere: logged as objects and by hand, in collections, with lists as states, synchronised."""

import os
from typing import Any

import lightning as L
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
from torchmetrics import MaxMetric, MeanMetric, MetricCollection, MetricTracker, MinMaxMetric
from torchmetrics.aggregation import CatMetric, RunningMean
from torchmetrics.classification import MulticlassAccuracy, MulticlassAUROC, MulticlassF1Score

import lightning_replica  # noqa: F401


class Measured(L.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Dropout(0.1), nn.Linear(16, 4))
        metrics = MetricCollection({"acc": MulticlassAccuracy(4), "f1": MulticlassF1Score(4, average="macro")})
        self.of_train, self.of_val = metrics.clone(prefix="train_"), metrics.clone(prefix="val_")
        self.loss: Any = nn.ModuleDict({"train_": MeanMetric(), "val_": MeanMetric()})
        self.auroc = MulticlassAUROC(4)  # keeps all predictions
        self.range = MinMaxMetric(MulticlassAccuracy(4))
        self.recent = RunningMean(window=5)
        self.every = CatMetric(sync_on_compute=False)
        self.best = MaxMetric()
        tracker = MetricTracker(MeanMetric(sync_on_compute=False), False)  # has another submodule after each epoch
        self.tracker: Any = tracker

    def step(self, batch):
        logits = self.net(batch[0])
        return nn.functional.cross_entropy(logits, batch[1]), logits

    def on_train_epoch_start(self):
        self.tracker.increment()

    def training_step(self, batch, batch_idx):
        loss, logits = self.step(batch)
        self.of_train.update(logits, batch[1])
        self.log_dict(self.of_train, on_step=False, on_epoch=True)
        self.loss["train_"](loss)
        self.log("train_loss", self.loss["train_"], on_step=True, on_epoch=True, prog_bar=True)
        self.recent(loss)
        self.log("recent", self.recent)
        self.every.update(loss)
        self.tracker.update(loss)
        return loss

    def on_train_epoch_end(self):
        self.log("spread", self.every.compute().std())  # of rank 0
        self.every.reset()
        self.log("lowest", self.tracker.best_metric(), sync_dist=True)

    def validation_step(self, batch, batch_idx):
        loss, logits = self.step(batch)
        self.of_val(logits, batch[1])
        self.log_dict(self.of_val)
        self.loss["val_"].update(loss)
        self.log("val_loss", self.loss["val_"], prog_bar=True)
        self.auroc.update(logits.softmax(-1), batch[1])
        self.log("auroc", self.auroc)
        self.range.update(logits, batch[1])

    def on_validation_epoch_end(self):
        self.log_dict({f"range_{name}": value for name, value in self.range.compute().items()}, sync_dist=True)
        self.best.update(self.of_val.compute()["val_acc"])
        self.log("best", self.best.compute(), prog_bar=True)

    def configure_optimizers(self):
        optimizer = torch.optim.Adam(self.parameters(), lr=1e-2)
        plateau = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, patience=0)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": plateau, "monitor": "val_loss"}}


L.seed_everything(6)
x = torch.randn(320, 8)
data = TensorDataset(x, x[:, :4].argmax(1))
trainer = L.Trainer(
    strategy=os.environ["WILD_STRATEGY"], accelerator="cpu", devices=2, max_epochs=3, log_every_n_steps=4
)
loaders = DataLoader(data, batch_size=8, shuffle=True), DataLoader(data, batch_size=16)
trainer.fit(Measured(), *loaders)
