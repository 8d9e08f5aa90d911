"""What it costs to be recoverable: steps with ``recovery=True`` against steps with ``recovery=False``.

    python benchmarks/recoverable.py

Two trainings of the same model, each with its own supervisor and ranks, take turns on the machine: while one makes a
block of steps, all processes of the other are stopped by SIGSTOP. So both see the same machine, and what one does in
the background does not slow the other. The figure is the ratio of neighbouring blocks' medians; its confidence
interval is bootstrapped over pairs of blocks.
"""

import argparse
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from statistics import median
from typing import Any

import lightning as L
import torch
from lightning.pytorch.callbacks import Callback
from torch.utils.data import DataLoader, TensorDataset

sys.path.insert(0, str(Path(__file__).parent))
from common import BATCH, LENGTH, VOCABULARY, Transformer, spread, write
from module import Module

from lightning_replica import ReplicaZeroStrategy

warnings.filterwarnings("ignore")
MODES: dict[str, dict[str, Any]] = {
    "off": {"recovery": False},
    "on": {"guard": "sampled"},
    "on, guard off": {"guard": "off"},
    "on, guard full": {"guard": "full"},
}


class Ends(Callback):
    """Rank 0 writes down when its steps ended."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def on_train_batch_end(self, trainer: L.Trainer, *_: Any) -> None:
        if trainer.is_global_zero:
            with self.path.open("a") as file:
                file.write(f"{time.monotonic_ns()}\n")


def train(mode: str, ranks: int, path: Path) -> None:
    """Until it is killed."""
    torch.manual_seed(0)
    tokens = torch.randint(0, VOCABULARY, (BATCH * ranks * 1000, LENGTH))
    trainer = L.Trainer(
        strategy=ReplicaZeroStrategy(**MODES[mode]),
        accelerator="cpu",
        devices=ranks,
        max_epochs=-1,
        callbacks=[Ends(path)],
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(Module(), DataLoader(TensorDataset(tokens), batch_size=BATCH))


class World:
    """One training that can be stopped and let go on."""

    def __init__(self, mode: str, ranks: int, path: Path) -> None:
        self.path = path
        path.touch()
        options = ["--mode", mode, "--ranks", str(ranks), "--path", str(path)]
        self.process = subprocess.Popen(
            [sys.executable, __file__, *options],
            start_new_session=True,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )

    def ends(self) -> list[int]:
        return [int(line) for line in self.path.read_text().split()]

    def signal(self, signum: signal.Signals) -> None:
        os.killpg(self.process.pid, signum)

    def steps(self, count: int) -> list[float]:
        """Lets it make ``count`` steps and returns their seconds; the first two, where it wakes up, are not counted."""
        before = len(self.ends())
        self.signal(signal.SIGCONT)
        while len(self.ends()) < before + count + 2:
            if self.process.poll() is not None:
                raise RuntimeError(f"a training ended with {self.process.returncode}")
            time.sleep(0.002)
        self.signal(signal.SIGSTOP)
        ends = self.ends()[before + 1 : before + count + 2]
        return [(b - a) / 1e9 for a, b in zip(ends, ends[1:], strict=False)]


@contextmanager
def worlds(modes: list[str], ranks: int) -> Iterator[dict[str, World]]:
    with tempfile.TemporaryDirectory() as place:
        found = {mode: World(mode, ranks, Path(place) / str(number)) for number, mode in enumerate(modes)}
        try:
            yield found
        finally:
            for world in found.values():
                world.signal(signal.SIGKILL)
                world.process.wait()


def interval(ratios: list[float]) -> tuple[float, float, float]:
    """Mean, and its 95 % confidence interval by bootstrap."""
    draw = random.Random(0)
    means = sorted(sum(draw.choices(ratios, k=len(ratios))) / len(ratios) for _ in range(4000))
    return sum(ratios) / len(ratios), means[100], means[-100]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--mode", choices=MODES)
    parser.add_argument("--path", type=Path)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=40)
    parser.add_argument("--block", type=int, default=6)
    args = parser.parse_args()
    if args.mode:
        train(args.mode, args.ranks, args.path)
        return
    blocks: dict[str, list[float]] = {mode: [] for mode in MODES}
    with worlds(list(MODES), args.ranks) as found:
        for world in found.values():  # nobody's warm-up disturbs the others
            for other in found.values():
                other.signal(signal.SIGSTOP)
            world.steps(10)
        for number in range(args.rounds):
            for mode in sorted(MODES, key=list(MODES).index, reverse=bool(number % 2)):
                blocks[mode].append(median(found[mode].steps(args.block)))
    rows = []
    for mode, own in blocks.items():
        ratios = [a / b for a, b in zip(own, blocks["off"], strict=True)]
        mean, low, high = interval(ratios)
        rows.append(
            [mode, spread(own), f"{100 * (mean - 1):+.2f} % ({100 * (low - 1):+.2f} .. {100 * (high - 1):+.2f})"]
        )
    notes = f"""
Seconds of a step; median and middle half of {args.rounds} blocks of {args.block} steps, the trainings taking turns. {args.ranks} ranks, R=2,
{sum(p.numel() for p in Transformer().parameters()) / 1e6:.1f} M parameters, fused AdamW. The last column is the mean over rounds of the block's median divided by that of
the "off" block beside it, with its 95 % confidence interval.
"""
    write(
        f"recoverable_{args.ranks}",
        "The cost of being recoverable",
        ["recovery", "step", "against off"],
        rows,
        notes,
        blocks,
    )


if __name__ == "__main__":
    main()
