"""The model of the benchmarks as a LightningModule."""

from typing import Any

import lightning as L
import torch
from common import Transformer, loss_of


class Module(L.LightningModule):
    """The model of the step-time benchmark."""

    def __init__(self) -> None:
        super().__init__()
        self.model = Transformer()

    def training_step(self, batch: Any, _: int) -> torch.Tensor:
        return loss_of(self.model, batch[0])

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), lr=1e-4, fused=True)
