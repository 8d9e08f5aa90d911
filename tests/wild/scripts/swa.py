"""StochasticWeightAveraging, which changes the schedule and the weights at the end."""

import os

import lightning as L
import torch
from lightning.pytorch.callbacks import LearningRateMonitor, StochasticWeightAveraging
from lightning.pytorch.demos.boring_classes import BoringModel
from torch import nn

import lightning_replica  # noqa: F401


class Model(BoringModel):
    def __init__(self) -> None:
        super().__init__()
        layers = nn.Linear(32, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Linear(16, 2)
        self.layer = nn.Sequential(*layers)  # type: ignore[assignment]

    def train_dataloader(self):
        return torch.utils.data.DataLoader(super().train_dataloader().dataset, batch_size=4, shuffle=True)

    def val_dataloader(self):
        return torch.utils.data.DataLoader(super().val_dataloader().dataset, batch_size=4)


L.seed_everything(9)
trainer = L.Trainer(
    strategy=os.environ["WILD_STRATEGY"],
    accelerator="cpu",
    devices=2,
    max_epochs=5,
    callbacks=[StochasticWeightAveraging(swa_lrs=1e-2, swa_epoch_start=2), LearningRateMonitor()],
    log_every_n_steps=4,
)
trainer.fit(Model())
