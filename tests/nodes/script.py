"""A training on nodes, four ranks in all, which ends with digests of its weights and of the batches seen."""

import hashlib
import os
import sys
from pathlib import Path

import lightning as L
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from lightning_replica import DyingGaspCheckpoint, ReplicaZeroStrategy


class Model(L.LightningModule):
    """Dropout, and a number that depends on all batches of this rank."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(8, 32), nn.Dropout(0.3), nn.Tanh(), nn.Linear(32, 1))
        self.seen = 0.0

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        self.seen += float(batch[0].double().sum()) * (batch_idx + 1)
        if (self.trainer.global_step, self.trainer.global_rank) == (WHEN, 0) and not MARKER.exists():
            MARKER.touch()  # the test makes the fault
        return nn.functional.mse_loss(self.layers(batch[0]), batch[1])

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=1e-2)


if __name__ == "__main__":
    OUT, NODES, WHEN, STEPS = Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]), int(sys.argv[4])
    MARKER = OUT / "now"
    torch.set_num_threads(1)
    L.seed_everything(11, verbose=False)
    x = torch.randn(4000, 8)
    trainer = L.Trainer(
        strategy=ReplicaZeroStrategy(resume="auto"),
        callbacks=[DyingGaspCheckpoint(OUT / "checkpoints")],
        accelerator="cpu",
        devices=4 // NODES,
        num_nodes=NODES,
        max_steps=STEPS,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    model = Model()
    trainer.fit(model, DataLoader(TensorDataset(x, x.sum(1, keepdim=True)), 4, shuffle=True))
    digest = hashlib.sha256()
    for tensor in [*model.state_dict().values(), torch.get_rng_state()]:
        digest.update(tensor.contiguous().view(-1).view(torch.uint8).numpy().tobytes())
    (OUT / f"rank{trainer.global_rank}").write_text(f"{trainer.global_step} {digest.hexdigest()} {model.seen.hex()}")
    (OUT / f"node{trainer.global_rank}").write_text(os.uname().nodename)
