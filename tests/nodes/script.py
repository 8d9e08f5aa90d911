"""A training on nodes, which stops where a test wants it, and ends with digests of weights and batches.

``python script.py OUT NODES RANKS STEPS STOPS``: STOPS is a JSON list of stops, each with a step, a place and a rank.
The n-th stop touches ``atN`` in OUT, and goes on once the test has touched ``goN`` there.
"""

import hashlib
import json
import os
import sys
import time
from pathlib import Path
from typing import Any

import lightning as L
import torch
from lightning.pytorch.loggers import CSVLogger
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from lightning_replica import CheckpointPublisher, DyingGaspCheckpoint, ReplicaZeroStrategy
from lightning_replica.chaos.fault_points import FaultPoint, FaultPointCallback
from lightning_replica.core import points

REPLICAS = int(os.environ.get("REPLICAS", "2"))
HANG_S = float(os.environ.get("HANG_S", "60"))
SKIP = int(os.environ.get("SKIP", "-1"))  # the step in which rank 2 leaves out a barrier, the first time
PAUSE_S = float(os.environ.get("PAUSE_S", "0"))  # in each step, until the test has touched "hurry" in OUT


class Model(L.LightningModule):
    """Dropout, and a number that depends on all batches of this rank."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(8, 32), nn.Dropout(0.3), nn.Tanh(), nn.Linear(32, 1))
        self.seen = 0.0

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        self.seen += float(batch[0].double().sum()) * (batch_idx + 1)
        loss = nn.functional.mse_loss(self.layers(batch[0]), batch[1])
        self.log("loss", loss)
        if self.trainer.global_step == SKIP:
            skipped = Path(sys.argv[1]) / f"skipped{self.trainer.global_rank}"
            first = not skipped.exists()
            skipped.touch()
            if first and self.trainer.global_rank != 2:
                torch.distributed.barrier()
        if PAUSE_S and not (Path(sys.argv[1]) / "hurry").exists():
            time.sleep(PAUSE_S)
        return loss

    def validation_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> None:
        self.log("validated", nn.functional.mse_loss(self.layers(batch[0]), batch[1]), sync_dist=True)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=1e-2)


class Stops(FaultPointCallback):
    """Stops at places, as the test wants it."""

    def __init__(self, out: Path, stops: list[Any]) -> None:
        super().__init__()
        self.out, self.stops = out, stops

    def reach(self, trainer: L.Trainer, point: FaultPoint) -> None:
        here = [trainer.global_step, point, trainer.global_rank]
        for number in [number for number, stop in enumerate(self.stops) if stop == here]:
            go = self.out / f"go{number}"
            if not go.exists():
                (self.out / f"at{number}").touch()
                while not go.exists():
                    points.waits()
                    time.sleep(0.005)
                points.goes_on()

    def on_train_batch_end(self, trainer: L.Trainer, *args: Any) -> None:
        super().on_train_batch_end(trainer, *args)
        if trainer.global_rank == 0:
            (self.out / "step").write_text(str(trainer.global_step))

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        where = self.out / f"process{trainer.global_rank}"
        where.with_suffix(".new").write_text(f"{os.uname().nodename} {os.getpid()}")
        where.with_suffix(".new").replace(where)


def main(out: Path, nodes: int, ranks: int, steps: int, stops: list[Any]) -> None:
    torch.set_num_threads(1)
    L.seed_everything(11, verbose=False)
    x = torch.randn(64 * ranks, 8)
    data = TensorDataset(x, x.sum(1, keepdim=True))
    trainer = L.Trainer(
        strategy=ReplicaZeroStrategy(replicas=REPLICAS, resume="auto", max_restarts=1000, hang_min_s=HANG_S),
        callbacks=[
            Stops(out, stops),
            DyingGaspCheckpoint(out / "checkpoints"),
            CheckpointPublisher(out / "checkpoints", every_n_train_steps=5, keep_last=2),
        ],
        logger=CSVLogger(out, name="", version="rows"),
        log_every_n_steps=1,
        accelerator="cpu",
        devices=ranks // nodes,
        num_nodes=nodes,
        max_steps=steps,
        val_check_interval=4,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    model = Model()
    trainer.fit(
        model, DataLoader(data, 4, shuffle=True), DataLoader(TensorDataset(x[:16], x[:16].sum(1, keepdim=True)), 4)
    )
    digest = hashlib.sha256()
    for tensor in [*model.state_dict().values(), torch.get_rng_state()]:
        digest.update(tensor.contiguous().view(-1).view(torch.uint8).numpy().tobytes())
    (out / f"rank{trainer.global_rank}").write_text(f"{trainer.global_step} {digest.hexdigest()} {model.seen.hex()}")


if __name__ == "__main__":
    nodes, ranks, steps = map(int, sys.argv[2:5])
    main(Path(sys.argv[1]), nodes, ranks, steps, json.loads(sys.argv[5]))
