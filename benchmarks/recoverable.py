"""What it costs to be recoverable: steps with ``recovery=True`` against steps with ``recovery=False``.

    python benchmarks/recoverable.py
    python benchmarks/recoverable.py --batch 16 --modes on      # a longer step

Trainings of the same model, each with its own supervisor and ranks, take turns on the machine: while one makes a block
of steps, SIGSTOP stops all processes of the others. So all of them see the same machine, and the background work of
one does not slow the others down. Wall time matters most, but it is noisy on a machine that others use; the CPU time of
rank 0's process, with all its threads, is less noisy. The figures are ratios of the medians of neighbouring blocks,
with confidence intervals that are bootstrapped over pairs of blocks.
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
from common import BATCH, LENGTH, QUIET, VOCABULARY, Transformer, spread, write
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
    """Records, on rank 0, when each step ended and how much CPU time the process had used by then."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def on_train_batch_end(self, trainer: L.Trainer, *_: Any) -> None:
        if trainer.is_global_zero:
            with self.path.open("a") as file:
                file.write(f"{time.monotonic_ns()} {time.process_time_ns()}\n")


def train(mode: str, ranks: int, batch: int, path: Path) -> None:
    """Train until the process is killed."""
    torch.manual_seed(0)
    tokens = torch.randint(0, VOCABULARY, (batch * ranks * 1000, LENGTH))
    trainer = L.Trainer(
        strategy=ReplicaZeroStrategy(**MODES[mode]),
        accelerator="cpu",
        devices=ranks,
        max_epochs=-1,
        callbacks=[Ends(path)],
        **QUIET,
    )
    trainer.fit(Module(), DataLoader(TensorDataset(tokens), batch_size=batch))


class World:
    """One training, which can be stopped and continued."""

    def __init__(self, mode: str, ranks: int, batch: int, path: Path) -> None:
        self.path = path
        path.touch()
        options = ["--mode", mode, "--ranks", str(ranks), "--batch", str(batch), "--path", str(path)]
        self.process = subprocess.Popen(
            [sys.executable, __file__, *options],
            start_new_session=True,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )

    def ends(self) -> list[tuple[int, int]]:
        lines = self.path.read_text().split("\n")[:-1]  # the last line may be incomplete
        return [(int(now), int(used)) for now, used in map(str.split, lines)]

    def signal(self, signum: signal.Signals) -> None:
        os.killpg(self.process.pid, signum)

    def steps(self, count: int) -> tuple[float, float]:
        """Let the training make ``count`` steps, after two that do not count because the processes wake up in them.

        Returns:
            The seconds of wall time and of CPU time of the median step.
        """
        before = len(self.ends())
        self.signal(signal.SIGCONT)
        while len(self.ends()) < before + count + 2:
            if self.process.poll() is not None:
                raise RuntimeError(f"a training ended with {self.process.returncode}")
            time.sleep(0.01)
        self.signal(signal.SIGSTOP)
        ends = self.ends()[before + 1 : before + count + 2]
        pairs = list(zip(ends, ends[1:], strict=False))
        return median((b[0] - a[0]) / 1e9 for a, b in pairs), median((b[1] - a[1]) / 1e9 for a, b in pairs)


@contextmanager
def worlds(modes: list[str], ranks: int, batch: int) -> Iterator[dict[str, World]]:
    with tempfile.TemporaryDirectory() as place:
        found = {mode: World(mode, ranks, batch, Path(place) / str(number)) for number, mode in enumerate(modes)}
        try:
            yield found
        finally:
            for world in found.values():
                world.signal(signal.SIGKILL)
                world.process.wait()


def against(own: list[float], off: list[float]) -> str:
    """Return the median ratio of neighbouring blocks and its bootstrapped 95 % confidence interval as text."""
    ratios = [a / b for a, b in zip(own, off, strict=True)]
    draw = random.Random(0)
    medians = sorted(median(draw.choices(ratios, k=len(ratios))) for _ in range(4000))
    middle, low, high = (100 * (ratio - 1) for ratio in (median(ratios), medians[100], medians[-100]))
    return f"{middle:+.2f} % ({low:+.2f} .. {high:+.2f})"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--mode", choices=MODES)
    parser.add_argument("--path", type=Path)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--batch", type=int, default=BATCH, help="sequences per rank and step")
    parser.add_argument("--rounds", type=int, default=40)
    parser.add_argument("--block", type=int, default=6)
    parser.add_argument("--modes", nargs="+", choices=MODES, default=list(MODES), help="modes to compare with 'off'")
    args = parser.parse_args()
    if args.mode:
        train(args.mode, args.ranks, args.batch, args.path)
        return
    modes = [mode for mode in MODES if mode == "off" or mode in args.modes]
    blocks: dict[str, list[tuple[float, float]]] = {mode: [] for mode in modes}
    with worlds(modes, args.ranks, args.batch) as found:
        for world in found.values():  # so that no warm-up disturbs the others
            for other in found.values():
                other.signal(signal.SIGSTOP)
            world.steps(10)
        for number in range(args.rounds):
            for mode in modes[:: -1 if number % 2 else 1]:
                blocks[mode].append(found[mode].steps(args.block))
    walls = {mode: [wall for wall, _ in own] for mode, own in blocks.items()}
    cpus = {mode: [cpu for _, cpu in own] for mode, own in blocks.items()}
    rows = [
        [
            mode,
            spread(walls[mode]),
            against(walls[mode], walls["off"]),
            spread(cpus[mode]),
            against(cpus[mode], cpus["off"]),
        ]
        for mode in modes
    ]
    notes = f"""
Seconds of a step; median and middle half of {args.rounds} blocks of {args.block} steps, the trainings taking turns. {args.ranks} ranks, R=2,
{sum(p.numel() for p in Transformer().parameters()) / 1e6:.1f} M parameters, fused AdamW, {args.batch} sequences of {LENGTH} tokens a rank. "Against off" is the median over rounds of the block's median step divided by that of
the "off" block beside it, with its 95 % confidence interval. CPU time is that of rank 0's process with all its threads.
"""
    write(
        f"recoverable_{args.ranks}" + (f"_batch_{args.batch}" if args.batch != BATCH else ""),
        "The cost of being recoverable",
        ["recovery", "step", "against off", "CPU time", "against off"],
        rows,
        notes,
        blocks,
    )


if __name__ == "__main__":
    main()
