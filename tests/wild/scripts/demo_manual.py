"""Lightning's BoringModel under manual optimization."""

import os

import lightning as L
from lightning.pytorch.demos.boring_classes import ManualOptimBoringModel

import lightning_replica  # noqa: F401

L.seed_everything(4)
trainer = L.Trainer(strategy=os.environ["WILD_STRATEGY"], accelerator="cpu", devices=2, max_epochs=2)
trainer.fit(ManualOptimBoringModel())
