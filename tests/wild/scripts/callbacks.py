"""Every callback of Lightning's that can be had together."""

import os
from datetime import timedelta

import lightning as L
import torch
from lightning.pytorch import callbacks as C
from lightning.pytorch.callbacks.on_exception_checkpoint import OnExceptionCheckpoint
from lightning.pytorch.demos.boring_classes import BoringModel, RandomDataset
from torch.utils.data import DataLoader

import lightning_replica  # noqa: F401


class Model(BoringModel):
    def training_step(self, batch, batch_idx):
        loss = self.step(batch)
        self.log("train_loss", loss, prog_bar=True, sync_dist=True)
        return {"loss": loss}

    def validation_step(self, batch, batch_idx):
        self.log("val_loss", self.step(batch), sync_dist=True)

    def predict_step(self, batch, batch_idx):
        return self(batch)

    def train_dataloader(self):
        return DataLoader(RandomDataset(32, 160), batch_size=2, shuffle=True)


class Writer(C.BasePredictionWriter):
    def write_on_epoch_end(self, trainer, pl_module, predictions, batch_indices):
        torch.save([predictions, batch_indices], f"predictions{trainer.global_rank}.pt")


L.seed_everything(7)
callbacks = [
    C.EarlyStopping("val_loss", patience=2),
    C.LearningRateMonitor("step"),
    C.GradientAccumulationScheduler({0: 1, 1: 2}),
    C.Timer(timedelta(hours=1)),
    C.DeviceStatsMonitor(cpu_stats=False),
    C.ModelSummary(max_depth=2),
    C.RichModelSummary(),
    C.TQDMProgressBar(),
    C.LambdaCallback(on_train_epoch_end=lambda trainer, module: print("epoch", trainer.current_epoch)),
    C.ModelCheckpoint("top", "{epoch}-{step}-{val_loss:.4f}", monitor="val_loss", save_top_k=2, save_last=True),
    C.ModelCheckpoint("every", "{step}", every_n_train_steps=7, save_top_k=-1),
    C.ModelCheckpoint("train", "{train_loss:.5f}", monitor="train_loss", every_n_train_steps=5, save_last="link"),
    OnExceptionCheckpoint("exception"),
    Writer(write_interval="epoch"),
]
trainer = L.Trainer(
    strategy=os.environ["WILD_STRATEGY"],
    accelerator="cpu",
    devices=2,
    max_epochs=3,
    callbacks=callbacks,
    log_every_n_steps=3,
    val_check_interval=0.5,
)
model = Model()
trainer.fit(model)
trainer.predict(model, DataLoader(RandomDataset(32, 16)), return_predictions=False)
