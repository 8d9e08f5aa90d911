"""All loggers of Lightning's that need no network, in one run, asked for their directories before `fit`."""

import os

import lightning as L
from lightning.pytorch.callbacks import LearningRateMonitor
from lightning.pytorch.demos.boring_classes import BoringModel
from lightning.pytorch.loggers import CSVLogger, MLFlowLogger, TensorBoardLogger, WandbLogger

import lightning_replica  # noqa: F401


class Model(BoringModel):
    def training_step(self, batch, batch_idx):
        loss = self.step(batch)
        self.log("train_loss", loss, on_step=True, on_epoch=True)
        return loss

    def validation_step(self, batch, batch_idx):
        self.log("val_loss", self.step(batch), sync_dist=True)


L.seed_everything(12)
loggers = [
    CSVLogger("csv", flush_logs_every_n_steps=4),
    TensorBoardLogger("tensorboard", log_graph=False, default_hp_metric=False),
    MLFlowLogger("wild", tracking_uri="file:./mlruns"),
    WandbLogger("wild", offline=True),
]
trainer = L.Trainer(
    strategy=os.environ["WILD_STRATEGY"],
    accelerator="cpu",
    devices=2,
    max_epochs=3,
    logger=loggers,
    callbacks=[LearningRateMonitor("epoch")],
    log_every_n_steps=3,
)
trainer.logger.log_hyperparams({"answer": 42})  # type: ignore[union-attr]
model = Model()
trainer.fit(model)
trainer.validate(model)
