"""Knows nothing of chaos: ``python chaos_script.py RANKS [odd] [slow] [workers] [standby] [clock] [hidden]``.

No two "odd" runs are the same. "slow" leaves time to be hit from outside, by which nothing else changes. "clock" keeps
a time, of which nothing depends. "hidden" depends on a global.
"""

import os
import sys
import time
from typing import Any

import lightning as L
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import lightning_replica

seen = 0


class Model(L.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(8, 8), nn.Dropout(0.1), nn.Linear(8, 1))
        self.began = time.time() if "clock" in sys.argv else 0
        self.seen = 0

    def training_step(self, batch: Any, _: int) -> torch.Tensor:
        time.sleep(0.3 * ("slow" in sys.argv))
        loss: torch.Tensor = self.net(batch[0]).square().mean()
        if "hidden" in sys.argv:
            global seen
            seen = self.seen = seen + 1
            loss = loss * seen
        return loss * (1 + os.urandom(1)[0]) if "odd" in sys.argv else loss

    def configure_optimizers(self) -> Any:
        return torch.optim.Adam(self.parameters(), lr=0.1)


def main() -> None:
    L.seed_everything(3, verbose=False)
    trainer = L.Trainer(
        strategy=lightning_replica.ReplicaZeroStrategy(standby=int("standby" in sys.argv)),
        accelerator="cpu",
        devices=int(sys.argv[1]),
        max_epochs=2,
        enable_progress_bar=False,
        enable_model_summary=False,
        enable_checkpointing=False,
        logger=False,
    )
    data, workers = TensorDataset(torch.randn(24, 8)), int("workers" in sys.argv)
    trainer.fit(Model(), DataLoader(data, batch_size=2, shuffle=True, num_workers=workers))


if __name__ == "__main__":
    main()
