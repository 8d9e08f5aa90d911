"""Loaders whose data is drawn where Lightning asks for them, anew in every epoch; random numbers in the model too."""

import os
import sys

import lightning as L
import torch
from lightning.pytorch.demos.boring_classes import BoringModel, RandomDataset
from torch import nn
from torch.utils.data import DataLoader

import lightning_replica  # noqa: F401


class Model(BoringModel):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Sequential(nn.Dropout(0.2), nn.Linear(32, 2))  # type: ignore[assignment]

    def training_step(self, batch, batch_idx):
        loss = self.step(batch)
        self.log("train_loss", loss)
        return loss

    def validation_step(self, batch, batch_idx):
        self.log("val_loss", self.step(batch), sync_dist=True)

    def train_dataloader(self):
        return DataLoader(RandomDataset(32, 64), batch_size=4, shuffle=True)

    def val_dataloader(self):
        return DataLoader(RandomDataset(32, 24), batch_size=4)

    def configure_optimizers(self):
        return torch.optim.Adam(self.parameters(), lr=1e-2)


L.seed_everything(18)
trainer = L.Trainer(
    strategy=os.environ["WILD_STRATEGY"],
    accelerator="cpu",
    devices=2,
    max_epochs=4,
    num_sanity_val_steps=int(sys.argv[1]),
    reload_dataloaders_every_n_epochs=int(sys.argv[2]),
    log_every_n_steps=2,
)
trainer.fit(Model())
