"""A progress bar, which the command line names, in a terminal."""

import os
import sys

import lightning as L
from lightning.pytorch import callbacks
from lightning.pytorch.demos.boring_classes import BoringModel

import lightning_replica  # noqa: F401

L.seed_everything(13)
trainer = L.Trainer(
    strategy=os.environ["WILD_STRATEGY"],
    accelerator="cpu",
    devices=2,
    max_epochs=2,
    callbacks=[getattr(callbacks, sys.argv[1])()],
)
trainer.fit(BoringModel())
