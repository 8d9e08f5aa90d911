"""Self-supervised learning with a momentum encoder, as BYOL and MoCo do it: it is not trained, it follows."""

import copy
import os
from typing import Any

import lightning as L
import torch
from torch import nn
from torch.nn.functional import cosine_similarity
from torch.utils.data import DataLoader, TensorDataset

import lightning_replica  # noqa: F401


class Byol(L.LightningModule):
    hparams: Any

    def __init__(self, momentum=0.9):
        super().__init__()
        self.save_hyperparameters()
        self.online = nn.Sequential(nn.Linear(12, 32), nn.BatchNorm1d(32), nn.ReLU(), nn.Linear(32, 8))
        self.predictor = nn.Linear(8, 8)
        self.target = copy.deepcopy(self.online)
        for parameter in self.target.parameters():
            parameter.requires_grad = False

    def training_step(self, batch, batch_idx):
        (x,) = batch
        first, second = (x + 0.1 * torch.randn_like(x) for _ in range(2))
        with torch.no_grad():
            wanted = self.target(second)
        loss = -cosine_similarity(self.predictor(self.online(first)), wanted).mean()
        self.log("loss", loss)
        return loss

    def on_before_zero_grad(self, optimizer):
        m = self.hparams.momentum
        for online, target in zip(self.online.parameters(), self.target.parameters(), strict=True):
            target.data = target.data * m + online.data * (1 - m)

    def on_train_epoch_end(self):
        self.log("size", sum(parameter.square().sum() for parameter in self.target.parameters()))

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.05, momentum=0.9)


L.seed_everything(8)
trainer = L.Trainer(
    strategy=os.environ["WILD_STRATEGY"], accelerator="cpu", devices=2, max_epochs=3, log_every_n_steps=2
)
trainer.fit(Byol(), DataLoader(TensorDataset(torch.randn(320, 12)), batch_size=8, shuffle=True))
