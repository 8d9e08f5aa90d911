"""LightningCLI that only builds; the script fits and tests by itself, classes come by name."""

from lightning.pytorch.cli import LightningCLI
from lightning.pytorch.demos import boring_classes  # noqa: F401

import lightning_replica  # noqa: F401

cli = LightningCLI(run=False, save_config_kwargs={"overwrite": True}, trainer_defaults={"max_epochs": 2})
cli.trainer.fit(cli.model, datamodule=cli.datamodule)
cli.trainer.test(cli.model, datamodule=cli.datamodule, ckpt_path="best")
