"""A classifier whose network, optimizer and schedule come from the configuration."""

from typing import Any

import lightning as L
import torch
from torchmetrics import MaxMetric, MeanMetric
from torchmetrics.classification import Accuracy


class Network(torch.nn.Module):
    def __init__(self, width=32):
        super().__init__()
        self.layers = torch.nn.Sequential(
            torch.nn.Linear(3, width), torch.nn.BatchNorm1d(width), torch.nn.ReLU(), torch.nn.Linear(width, 8)
        )

    def forward(self, x):
        return self.layers(x)


class Classifier(L.LightningModule):
    hparams: Any

    def __init__(self, net, optimizer, scheduler):
        super().__init__()
        self.save_hyperparameters(logger=False, ignore=["net"])
        self.net = net
        self.criterion = torch.nn.CrossEntropyLoss()
        self.train_acc, self.val_acc, self.test_acc = (Accuracy(task="multiclass", num_classes=8) for _ in range(3))
        self.train_loss, self.val_loss, self.test_loss = MeanMetric(), MeanMetric(), MeanMetric()
        self.val_acc_best = MaxMetric()

    def on_train_start(self):
        """Forgets what the sanity check has counted."""
        for metric in (self.val_loss, self.val_acc, self.val_acc_best):
            metric.reset()

    def _step(self, batch):
        points, labels = batch
        logits = self.net(points)
        return self.criterion(logits, labels), logits.argmax(1), labels

    def training_step(self, batch, batch_idx):
        loss, predicted, labels = self._step(batch)
        self.train_loss(loss)
        self.train_acc(predicted, labels)
        self.log("train/loss", self.train_loss, on_step=False, on_epoch=True, prog_bar=True)
        self.log("train/acc", self.train_acc, on_step=False, on_epoch=True, prog_bar=True)
        return loss

    def validation_step(self, batch, batch_idx):
        loss, predicted, labels = self._step(batch)
        self.val_loss(loss)
        self.val_acc(predicted, labels)
        self.log("val/loss", self.val_loss, on_step=False, on_epoch=True, prog_bar=True)
        self.log("val/acc", self.val_acc, on_step=False, on_epoch=True, prog_bar=True)

    def on_validation_epoch_end(self):
        self.val_acc_best(self.val_acc.compute())
        self.log("val/acc_best", self.val_acc_best.compute(), sync_dist=True, prog_bar=True)

    def test_step(self, batch, batch_idx):
        loss, predicted, labels = self._step(batch)
        self.test_loss(loss)
        self.test_acc(predicted, labels)
        self.log("test/loss", self.test_loss, on_step=False, on_epoch=True)
        self.log("test/acc", self.test_acc, on_step=False, on_epoch=True)

    def configure_optimizers(self):
        optimizer = self.hparams.optimizer(params=self.trainer.model.parameters())  # type: ignore[union-attr]
        scheduler = self.hparams.scheduler(optimizer=optimizer)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "monitor": "val/loss"}}
