"""Several fits of one script: two of one Trainer, another Trainer from a checkpoint, and what comes between."""

import os
from typing import Any

import lightning as L
from lightning.pytorch.demos.boring_classes import BoringDataModule, BoringModel

import lightning_replica  # noqa: F401

common: dict[str, Any] = {"strategy": os.environ["WILD_STRATEGY"], "accelerator": "cpu", "devices": 2}
L.seed_everything(16)
model = BoringModel()
trainer = L.Trainer(max_epochs=2, **common)
trainer.fit(model, datamodule=BoringDataModule())
trainer.validate(model)
trainer.fit_loop.max_epochs = 3
trainer.fit(model, datamodule=BoringDataModule())
second = L.Trainer(max_epochs=4, **common)
second.fit(model, ckpt_path=trainer.checkpoint_callback.best_model_path)  # type: ignore[union-attr]
second.test(model, ckpt_path="best")
