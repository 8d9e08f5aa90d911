"""A user's script that uses its loggers before `fit`. Arguments: the strategy, and RANK:STEP of those to be killed."""

import json
import os
import signal
import sys
import warnings
from contextlib import suppress
from pathlib import Path

import lightning as L
import torch
from lightning.pytorch.callbacks import Callback, LearningRateMonitor, ModelCheckpoint
from lightning.pytorch.demos.boring_classes import BoringModel, RandomDataset
from lightning.pytorch.loggers import CSVLogger, Logger, MLFlowLogger, TensorBoardLogger, WandbLogger
from torch.utils.data import DataLoader

import lightning_replica  # noqa: F401

STRATEGY, KILLED = sys.argv[1], [tuple(map(int, each.split(":"))) for each in sys.argv[2:]]
warnings.simplefilter("ignore")


class Model(BoringModel):
    def __init__(self, width: int = 32) -> None:
        super().__init__()
        self.save_hyperparameters()

    def training_step(self, batch: torch.Tensor, batch_idx: int) -> torch.Tensor:
        loss = self.layer(batch).square().mean()
        self.log("loss", loss)
        return loss

    def validation_step(self, batch: torch.Tensor, batch_idx: int) -> None:
        self.log("val", self.layer(batch).square().mean(), sync_dist=True)


class Kill(Callback):
    def on_after_backward(self, trainer: L.Trainer, *_: object) -> None:
        for rank, step in KILLED:
            marker = Path(f"killed{rank}")
            if (trainer.global_rank, trainer.global_step) == (rank, step) and not marker.exists():
                marker.touch()
                os.kill(os.getpid(), signal.SIGKILL)


def loggers() -> list[Logger]:
    made: list[Logger] = [CSVLogger(".", name="early"), CSVLogger(".", name="late")]
    with suppress(ModuleNotFoundError):
        made.append(TensorBoardLogger(".", name="tensorboard"))
    with suppress(ModuleNotFoundError):
        made.append(MLFlowLogger(tracking_uri=f"file:{os.getcwd()}/mlflow"))
    with suppress(ModuleNotFoundError):
        made.append(WandbLogger(save_dir=".", offline=True))
    return made


def main() -> None:
    L.seed_everything(1, verbose=False)
    own = loggers()
    for logger in own[:1] + own[2:]:
        logger.log_hyperparams({"early": 1})  # before there is a Trainer
    rates = LearningRateMonitor("step")
    trainer = L.Trainer(
        strategy=STRATEGY,
        accelerator="cpu",
        devices=2,
        max_epochs=2,
        log_every_n_steps=1,
        logger=own,
        callbacks=[rates, ModelCheckpoint("checkpoints", monitor="val"), Kill()],
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    for logger in trainer.loggers:
        logger.log_hyperparams({"between": 2})
    data = DataLoader(RandomDataset(32, 24), batch_size=2)
    trainer.fit(Model(), data, data)
    Path(f"rates{trainer.global_rank}.json").write_text(json.dumps(rates.lrs))


if __name__ == "__main__":
    main()
