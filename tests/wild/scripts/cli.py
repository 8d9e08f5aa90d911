"""LightningCLI with all its defaults, on Lightning's own demos."""

from lightning.pytorch.cli import LightningCLI
from lightning.pytorch.demos.boring_classes import BoringDataModule, BoringModel

import lightning_replica  # noqa: F401

cli = LightningCLI(BoringModel, BoringDataModule)
