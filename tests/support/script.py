"""A user's script, run as `python script.py`: through the real supervisor, with real re-runs."""

import hashlib
import os
import signal
import sys
import time
from pathlib import Path
from typing import Any

import lightning as L
import torch
from lightning.pytorch.callbacks import Callback
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import lightning_replica

MODE, RANK = sys.argv[1], int(sys.argv[2])
STANDBY = int(os.environ.get("STANDBY", "0"))
NODES = int(os.environ.get("NODES", "1"))
GASP = os.environ.get("GASP")  # the directory of checkpoints: whoever is left saves, and the next run goes on


class Model(L.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(8, 8), nn.Dropout(0.1), nn.Linear(8, 1))

    def training_step(self, batch: Any, _: int) -> torch.Tensor:
        return self.net(batch[0]).square().mean()

    def validation_step(self, batch: Any, _: int) -> None:
        self.log("val", self.net(batch[0]).square().mean(), sync_dist=True)

    def configure_optimizers(self) -> Any:
        return torch.optim.Adam(self.parameters(), lr=0.1)


# What is not 0 in a process that takes another's place.
LIVES = ("LIGHTNING_REPLICA_GENERATION", "TORCHELASTIC_RESTART_COUNT", "SLURM_RESTART_COUNT")


COMMAND = Path("/proc/self/comm")  # the process's name says that it has raised: its variables go back with the step


class Break(Callback):
    def on_after_backward(self, trainer: L.Trainer, _: Any) -> None:
        first = all(os.environ.get(name, "0") == "0" for name in LIVES) and not (GASP and trainer.ckpt_path)
        if MODE == "raise and kill" and first and COMMAND.read_text() == "raised\n" and trainer.global_step == 3:
            os.kill(os.getpid(), signal.SIGKILL)
        if trainer.global_step != 2 or trainer.global_rank != RANK:
            return
        if MODE == "wait" and first:
            print("waiting", flush=True)
            while not trainer.strategy.training.stop_requested:  # type: ignore[attr-defined]
                time.sleep(0.01)
        if MODE == "raise and kill" and first and COMMAND.read_text() != "raised\n":
            COMMAND.write_text("raised")
            raise RuntimeError("injected")
        if MODE == "abort":
            os.abort()
        if MODE == "kill" and first:
            while len(Path(f"/proc/{os.getppid()}/task/{os.getppid()}/children").read_text().split()) < 2 + STANDBY:
                time.sleep(0.01)
            os.kill(os.getpid(), signal.SIGKILL)

    def on_exception(self, trainer: L.Trainer, _: Any, error: BaseException) -> None:
        print(f"on_exception {type(error).__name__} in {os.environ.get('LOCAL_RANK')}", flush=True)


def main() -> None:
    L.seed_everything(3, verbose=False)
    model = Model()
    data = DataLoader(TensorDataset(torch.randn(40, 8)), batch_size=2, shuffle=True)
    trainer = L.Trainer(
        strategy=lightning_replica.ReplicaZeroStrategy(standby=STANDBY, resume="auto" if GASP else None),
        accelerator="cpu",
        devices=2 // NODES,
        num_nodes=NODES,
        max_epochs=1,
        callbacks=[Break(), *([lightning_replica.DyingGaspCheckpoint(GASP)] if GASP else ())],
        enable_progress_bar=False,
        enable_checkpointing=False,
        logger=False,
    )
    if MODE == "nothing":
        return
    trainer.fit(model, data, data)
    metrics = trainer.validate(model, data, verbose=False)
    digest = hashlib.sha256(b"".join(p.detach().numpy().tobytes() for p in model.parameters())).hexdigest()
    print(f"rank {trainer.global_rank} pid {os.getpid()} {digest[:12]} {metrics[0]['val']:.9f}", flush=True)
    if sys.orig_argv[1] == "-c":
        print(f"rank {trainer.global_rank} was a standby", flush=True)
    if MODE == "exit" and trainer.global_rank == RANK:
        sys.exit(7)


if __name__ == "__main__":
    main()
