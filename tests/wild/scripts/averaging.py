"""Averages of the weights: EMAWeightAveraging, in Lightning's shape, with checkpoints of its own."""

import os

import lightning as L
from lightning.pytorch.callbacks import EMAWeightAveraging, ModelCheckpoint
from lightning.pytorch.demos.boring_classes import BoringModel

import lightning_replica  # noqa: F401

L.seed_everything(8)
trainer = L.Trainer(
    strategy=os.environ["WILD_STRATEGY"],
    accelerator="cpu",
    devices=2,
    max_epochs=2,
    callbacks=[EMAWeightAveraging(decay=0.9), ModelCheckpoint(every_n_train_steps=10, save_top_k=-1)],
)
trainer.fit(BoringModel())
