"""A byte-level GPT on the source of Python's standard library, on four CPU ranks.

    python examples/gpt.py                      # train
    python examples/gpt.py --kill 2 --at 20     # rank 2 kills itself after 20 steps

Nothing in the model or the data knows about recovery; the only line that matters is `strategy="replica_zero"`.
"""

import argparse
import hashlib
import json
import logging
import os
import signal
import sysconfig
import warnings
from pathlib import Path
from typing import Any

import lightning as L
import torch
from lightning.pytorch.callbacks import Callback
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.data import DataLoader, Dataset

from lightning_replica import DyingGaspCheckpoint, ReplicaZeroStrategy

logging.getLogger("lightning.pytorch.utilities.rank_zero").setLevel(logging.WARNING)  # no tips, no GPU report
# Raised inside Lightning 2.6 by torch 2.13.
warnings.filterwarnings("ignore", message=r".*LeafSpec.*")
warnings.filterwarnings("ignore", message=r".*does not have many workers.*")


class Text(Dataset[Tensor]):
    """Windows of ``length + 1`` bytes, side by side."""

    def __init__(self, length: int) -> None:
        files = sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py"))
        self.data = torch.frombuffer(bytearray(b"".join(f.read_bytes() for f in files)), dtype=torch.uint8)
        self.length = length

    def __len__(self) -> int:
        return (len(self.data) - 1) // self.length

    def __getitem__(self, index: int) -> Tensor:
        start = index * self.length
        return self.data[start : start + self.length + 1].long()


class TextData(L.LightningDataModule):
    """`Text` for training, shuffled."""

    def __init__(self, length: int = 64, batch_size: int = 4) -> None:
        super().__init__()
        self.length, self.batch_size = length, batch_size

    def train_dataloader(self) -> DataLoader[Tensor]:
        return DataLoader(Text(self.length), batch_size=self.batch_size, shuffle=True)


class Block(nn.Module):
    """Attention and a feed-forward layer."""

    def __init__(self, width: int, heads: int, dropout: float) -> None:
        super().__init__()
        self.heads, self.dropout = heads, dropout
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))
        self.drop = nn.Dropout(dropout)

    def forward(self, x: Tensor) -> Tensor:
        b, t, c = x.shape
        q, k, v = self.qkv(self.norm1(x)).view(b, t, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        mixed = functional.scaled_dot_product_attention(
            q, k, v, is_causal=True, dropout_p=self.dropout if self.training else 0.0
        )
        x = x + self.drop(self.out(mixed.transpose(1, 2).reshape(b, t, c)))
        return x + self.drop(self.mlp(self.norm2(x)))


class GPT(L.LightningModule):
    """About 10 million parameters."""

    def __init__(
        self, width: int = 320, depth: int = 8, heads: int = 5, length: int = 64, dropout: float = 0.1
    ) -> None:
        super().__init__()
        self.length = length
        self.bytes, self.places = nn.Embedding(256, width), nn.Embedding(length, width)
        self.blocks = nn.Sequential(*[Block(width, heads, dropout) for _ in range(depth)])
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, 256)

    def forward(self, x: Tensor) -> Tensor:
        places = torch.arange(x.shape[1], device=x.device)
        return self.head(self.norm(self.blocks(self.bytes(x) + self.places(places))))

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        loss = functional.cross_entropy(self(batch[:, :-1]).flatten(0, 1), batch[:, 1:].flatten())
        self.log("loss", loss, sync_dist=True)
        return loss

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.AdamW(self.parameters(), lr=1e-3, fused=True)
        warmup = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: min(1.0, (step + 1) / 10))
        return [optimizer], [{"scheduler": warmup, "interval": "step"}]

    @torch.no_grad()
    def sample(self, prompt: bytes, count: int) -> str:
        """Return ``count`` bytes that continue ``prompt``, with the prompt itself."""
        self.eval()
        text = torch.tensor([list(prompt)])
        for _ in range(count):
            odds = self(text[:, -self.length :])[:, -1].div(0.7).softmax(-1)
            text = torch.cat([text, torch.multinomial(odds, 1)], 1)
        return bytes(text[0].tolist()).decode(errors="replace")


class Say(Callback):
    """Prints the loss on rank 0."""

    def __init__(self, every: int) -> None:
        self.every = every

    def on_train_batch_end(self, trainer: L.Trainer, *_: Any) -> None:
        if trainer.is_global_zero and trainer.global_step % self.every == 0:
            print(f"step {trainer.global_step:4d}  loss {trainer.callback_metrics['loss']:.3f}", flush=True)


class Kill(Callback):
    """Ends one rank as a broken machine would: SIGKILL, with no clean-up and no last message."""

    def __init__(self, rank: int, step: int) -> None:
        self.rank, self.step = rank, step

    def on_before_optimizer_step(self, trainer: L.Trainer, *_: Any) -> None:
        first_life = os.environ.get("LIGHTNING_REPLICA_GENERATION") == "0"
        if (trainer.global_rank, trainer.global_step) == (self.rank, self.step) and first_life:
            print(f"rank {self.rank} kills itself in step {self.step}", flush=True)
            os.kill(os.getpid(), signal.SIGKILL)


class Preempt(Callback):
    """Ends the run as a scheduler that wants its machines back would: SIGTERM to the supervisor."""

    def __init__(self, step: int) -> None:
        self.step = step

    def on_before_optimizer_step(self, trainer: L.Trainer, *_: Any) -> None:
        if trainer.is_global_zero and trainer.global_step == self.step and not trainer.ckpt_path:
            print(f"the scheduler wants its machines back in step {self.step}: SIGTERM", flush=True)
            os.kill(os.getppid(), signal.SIGTERM)


def fingerprint(model: nn.Module) -> str:
    """Return the SHA-256 of every bit of every parameter."""
    digest = hashlib.sha256()
    for parameter in model.parameters():
        digest.update(parameter.detach().numpy().tobytes())
    return digest.hexdigest()


def arguments() -> argparse.Namespace:
    """Parse the command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--devices", type=int, default=4, help="number of ranks")
    parser.add_argument("--kill", type=int, metavar="RANK", help="rank that kills itself; 0 is allowed")
    parser.add_argument("--preempt", action="store_true", help="send SIGTERM to the run")
    parser.add_argument("--at", type=int, metavar="STEP", help="when that happens (default: halfway)")
    parser.add_argument("--checkpoints", type=Path, help="save here if the run cannot continue; resume from here")
    parser.add_argument("--result", type=Path, help="write the fingerprint and a sample to this file")
    return parser.parse_args()


def main() -> None:
    """Train, and print the result."""
    args = arguments()
    L.seed_everything(1, verbose=False)
    model = GPT()
    callbacks: list[Callback] = [Say(every=5)]
    at = args.steps // 2 if args.at is None else args.at
    if args.kill is not None:
        callbacks.append(Kill(args.kill, at))
    if args.preempt:
        callbacks.append(Preempt(at))
    if args.checkpoints:
        callbacks.append(DyingGaspCheckpoint(args.checkpoints))
    trainer = L.Trainer(
        strategy=ReplicaZeroStrategy(resume="auto") if args.checkpoints else "replica_zero",
        accelerator="cpu",
        devices=args.devices,
        max_steps=args.steps,
        gradient_clip_val=1.0,
        callbacks=callbacks,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(model, DataLoader(Text(model.length), batch_size=4, shuffle=True))
    if trainer.is_global_zero:
        torch.manual_seed(0)
        result = {"fingerprint": fingerprint(model), "sample": model.sample(b"def ", 200)}
        print(f"fingerprint {result['fingerprint'][:32]}")
        if args.result:
            args.result.write_text(json.dumps(result))


if __name__ == "__main__":
    main()
