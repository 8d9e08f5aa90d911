"""A search for the learning rate, by the Tuner, then the training."""

import os
from typing import Any

import lightning as L
import torch
from lightning.pytorch.demos.boring_classes import BoringModel
from lightning.pytorch.tuner import Tuner

import lightning_replica  # noqa: F401


class Model(BoringModel):
    hparams: Any

    def __init__(self, lr: float = 1e-3) -> None:
        super().__init__()
        self.save_hyperparameters()

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=self.hparams.lr)


L.seed_everything(17)
model = Model()
trainer = L.Trainer(strategy=os.environ["WILD_STRATEGY"], accelerator="cpu", devices=2, max_epochs=2)
Tuner(trainer).lr_find(model, num_training=30)
trainer.fit(model)
