"""Lightning's BoringModel with its DataModule; every default of Trainer."""

import os

import lightning as L
from lightning.pytorch.demos.boring_classes import BoringDataModule, BoringModel

import lightning_replica  # noqa: F401

L.seed_everything(1)
trainer = L.Trainer(strategy=os.environ["WILD_STRATEGY"], accelerator="cpu", devices=2, max_epochs=2)
model, data = BoringModel(), BoringDataModule()
trainer.fit(model, datamodule=data)
trainer.validate(model, datamodule=data)
trainer.test(model, datamodule=data, ckpt_path="best")
trainer.predict(model, datamodule=data)
