"""Memory of a rank, measured against the formula of `lightning-replica plan`.

    python benchmarks/memory.py --ranks 4

A model of about 67 M parameters makes three steps with a tiny batch under each strategy, each time in new processes.
Memory is the proportional set size (Pss, which divides shared pages among the ranks that map them) after the last step,
minus that of the process before the model was built. The activations of such a small batch are negligible.
"""

import argparse
import os
import subprocess
import sys
import warnings
from pathlib import Path
from typing import Any

import lightning as L
import torch
from lightning.pytorch.strategies import DDPStrategy
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

sys.path.insert(0, str(Path(__file__).parent))
from common import QUIET, write

from lightning_replica import ReplicaZeroStrategy
from lightning_replica.core.options import RecoveryOptions
from lightning_replica.launch.environment import RankEnvironment
from lightning_replica.launch.node import start_script
from lightning_replica.launch.supervisor import Supervisor

warnings.filterwarnings("ignore")
WIDTH, DEPTH = 2048, 16
PARAMETERS = DEPTH * WIDTH * (WIDTH + 1)
BYTES = {"parameters": 4, "gradients": 4, "main parameters": 4, "AdamW": 8}
CONTENDERS = [
    "DDP, bucket views",
    "replica_zero R=1",
    "replica_zero R=1, sockets",
    "replica_zero R=2",
    "replica_zero R=2, sockets",
    "replica_zero R=4",
    "replica_zero R=4, sockets",
]


class Module(L.LightningModule):
    """Square layers."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(*[nn.Linear(WIDTH, WIDTH) for _ in range(DEPTH)])

    def training_step(self, batch: Any, _: int) -> torch.Tensor:
        return self.layers(batch[0]).square().mean()

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), lr=1e-4, fused=True)


def expected(contender: str, ranks: int) -> float:
    """Return the bytes per parameter by the formula."""
    if contender.startswith("DDP"):
        return BYTES["parameters"] + BYTES["gradients"] + BYTES["AdamW"]
    shards = ranks / int(contender.split("R=")[1][0])
    whole = BYTES["parameters"] + BYTES["gradients"]
    receiving = 4 * 16 * 2**20 / PARAMETERS if "sockets" in contender else 0  # four buckets of 16 MiB in flight
    return whole + (BYTES["main parameters"] + BYTES["AdamW"]) / shards + receiving


def strategy_of(contender: str) -> Any:
    if contender.startswith("DDP"):
        return DDPStrategy(gradient_as_bucket_view=True)
    return ReplicaZeroStrategy(replicas=int(contender.split("R=")[1][0]), shared_memory="sockets" not in contender)


def memory() -> int:
    """Return the proportional set size in bytes."""
    for line in Path("/proc/self/smaps_rollup").read_text().splitlines():
        if line.startswith("Pss:"):
            return 1024 * int(line.split()[1])
    return 0


def rank_main(ranks: int, contender: str) -> None:
    torch.set_num_threads(1)
    before = memory()
    trainer = L.Trainer(
        strategy=strategy_of(contender),
        accelerator="cpu",
        devices=ranks,
        max_steps=3,
        **QUIET,
        callbacks=[AtEnd(before)],
    )
    trainer.fit(Module(), DataLoader(TensorDataset(torch.randn(8 * ranks, WIDTH)), batch_size=2))


class AtEnd(L.Callback):
    """Measures the memory after the last step."""

    def __init__(self, before: int) -> None:
        self.before = before

    def on_train_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        trainer.strategy.barrier()
        taken = trainer.strategy.reduce(torch.tensor(float(memory() - self.before)), reduce_op="mean")
        if trainer.is_global_zero:
            print(f"taken {float(taken)}", flush=True)
        trainer.strategy.barrier()


def measure(ranks: int, contender: str) -> float:
    command = [sys.executable, __file__, "--ranks", str(ranks), "--one", contender]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
    return float(next(line.split()[1] for line in done.stdout.splitlines() if line.startswith("taken")))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--one", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if RankEnvironment.current() is not None or "LOCAL_RANK" in os.environ:
        rank_main(args.ranks, args.one)
        return 0
    if args.one:
        if args.one.startswith("DDP"):
            rank_main(args.ranks, args.one)
            return 0
        command = [sys.executable, *sys.argv]
        return Supervisor(
            start_script(lambda _: (command, None)), args.ranks, RecoveryOptions(recovery=False), print
        ).run()
    rows, raw = [], {}
    for contender in CONTENDERS:
        taken = measure(args.ranks, contender) / PARAMETERS
        formula = expected(contender, args.ranks)
        raw[contender] = taken
        rows.append([contender, f"{taken:.2f}", f"{formula:.2f}", f"{taken / formula - 1:+.1%}"])
    notes = f"""
{PARAMETERS / 1e6:.0f} M parameters, fp32, fused AdamW, {args.ranks} ranks on CPU; mean over ranks. DDP keeps parameters, gradients and
optimizer state, 4 + 4 + 8; replica_zero keeps main parameters and optimizer state for 1/S of them, S = N/R. Lightning's
default DDP (without bucket views) takes 4 more. With sockets, receive buffers of up to four buckets (16 MiB each) come on top.
"""
    header = ["", "bytes per parameter and rank", "formula", "off by"]
    write(f"memory_{args.ranks}", f"Memory, {args.ranks} ranks", header, rows, notes, raw)
    return 0


if __name__ == "__main__":
    sys.exit(main())
