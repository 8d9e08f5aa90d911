"""BackboneFinetuning: a parameter group comes in the middle."""

import os

import lightning as L
import torch
from lightning.pytorch.callbacks import BackboneFinetuning
from lightning.pytorch.demos.boring_classes import BoringModel
from torch import nn

import lightning_replica  # noqa: F401


class Model(BoringModel):
    def __init__(self) -> None:
        super().__init__()
        self.backbone = nn.Sequential(nn.Linear(32, 32), nn.ReLU())

    def forward(self, x):
        return self.layer(self.backbone(x))

    def configure_optimizers(self):
        optimizer = torch.optim.Adam([p for p in self.parameters() if p.requires_grad], lr=1e-2)
        return [optimizer], [torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.9)]


L.seed_everything(10)
strategy = os.environ["WILD_STRATEGY"]
trainer = L.Trainer(
    strategy="ddp_find_unused_parameters_true" if strategy == "ddp" else strategy,
    accelerator="cpu",
    devices=2,
    max_epochs=4,
    callbacks=[BackboneFinetuning(unfreeze_backbone_at_epoch=2, verbose=True)],
)
trainer.fit(Model())
