"""A training of about one second on two ranks: ``python -m lightning_replica.cli.smoke RESULT [--kill RANK]``.

The script is like a user's script and runs under the real supervisor. It writes the SHA-256 of the final weights to
RESULT.
"""

import argparse
import hashlib
import os
import signal
import warnings
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from lightning_replica import ReplicaZeroStrategy
from lightning_replica._compat.lightning_names import Callback, pl

_KILLED_IN_STEP = 3


class Net(pl.LightningModule):
    """A model of a few layers, with dropout."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(32, 64), nn.ReLU(), nn.Dropout(0.1), nn.Linear(64, 1))

    def training_step(self, batch: list[Tensor], _: int) -> Tensor:
        """Return a loss with a gradient; its value does not matter."""
        loss: Tensor = self.net(batch[0]).square().mean()
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """Return an AdamW optimizer, as most jobs use it."""
        return torch.optim.AdamW(self.parameters(), lr=1e-2)


class Kill(Callback):
    """A callback that kills one rank by SIGKILL, once."""

    def __init__(self, rank: int) -> None:
        self.rank = rank

    def on_before_optimizer_step(self, trainer: pl.Trainer, *_: Any) -> None:
        """Kill the rank between backward and the update, when a gradient is already being sent to the peers."""
        first_life = os.environ["LIGHTNING_REPLICA_GENERATION"] == "0"
        if (trainer.global_rank, trainer.global_step) == (self.rank, _KILLED_IN_STEP) and first_life:
            os.kill(os.getpid(), signal.SIGKILL)


def main() -> None:
    """Train, and write the result on rank 0."""
    parser = argparse.ArgumentParser(description="Trains on two ranks for a second.")
    parser.add_argument("result", type=Path)
    parser.add_argument("--kill", type=int, metavar="RANK")
    options = parser.parse_args()
    warnings.simplefilter("ignore")
    pl.seed_everything(1, verbose=False)
    model = Net()
    trainer = pl.Trainer(
        strategy=ReplicaZeroStrategy(replicas=2),
        accelerator="cpu",
        devices=2,
        max_epochs=1,
        callbacks=[] if options.kill is None else [Kill(options.kill)],
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(model, DataLoader(TensorDataset(torch.randn(64, 32)), batch_size=4, shuffle=True))
    if trainer.is_global_zero:
        weights = b"".join(p.detach().numpy().tobytes() for p in model.parameters())
        options.result.write_text(hashlib.sha256(weights).hexdigest())


if __name__ == "__main__":
    main()
