"""A training on two ranks, which ends with a digest of its weights. At some steps it waits for the test."""

import hashlib
import sys
import time
from pathlib import Path

import lightning as L
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from lightning_replica import DyingGaspCheckpoint, ReplicaZeroStrategy


class Model(L.LightningModule):
    """A layer with dropout, so that the digest depends on random numbers too."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(8, 16), nn.Dropout(0.3), nn.Linear(16, 1))

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        if self.trainer.is_global_zero and self.trainer.global_step in WAITS:
            (OUT / f"at{self.trainer.global_step}").touch()
            while not (OUT / f"go{self.trainer.global_step}").exists():
                time.sleep(0.01)
        return nn.functional.mse_loss(self.layers(batch[0]), batch[1])

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=1e-2)


if __name__ == "__main__":
    OUT, NODES, WAITS = Path(sys.argv[1]), int(sys.argv[2]), [int(step) for step in sys.argv[3:]]
    torch.set_num_threads(1)
    L.seed_everything(7, verbose=False)
    x = torch.randn(400, 8)
    trainer = L.Trainer(
        strategy=ReplicaZeroStrategy(resume="auto"),
        callbacks=[DyingGaspCheckpoint(OUT / "checkpoints")],
        accelerator="cpu",
        devices=2 // NODES,
        num_nodes=NODES,
        max_steps=60,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    model = Model()
    trainer.fit(model, DataLoader(TensorDataset(x, x.sum(1, keepdim=True)), 4, shuffle=True))
    digest = hashlib.sha256(b"".join(tensor.numpy().tobytes() for tensor in model.state_dict().values()))
    (OUT / f"rank{trainer.global_rank}").write_text(f"{trainer.global_step} {digest.hexdigest()}")
