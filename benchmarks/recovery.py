"""Recovery time by phase, with the model of `benchmarks/common.py`: 20 exceptions, 20 kills, and 20 with a standby.

    python benchmarks/recovery.py
    python benchmarks/recovery.py --standby 1 --kind SIGKILL   # only this kind, without a table

Everything works as it does for a user: ranks run this script again. The replacement of a killed rank starts Python,
imports torch and lightning, builds model and data, and receives its shard. The figures come from the run's own log
lines ("recovered at ..."). They measure the time from the moment when a survivor sees the fault to the moment when it
resumes.
"""

import argparse
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
import warnings
from pathlib import Path
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
EVERY = 4  # steps between faults
REFILL_S = 8.0  # time for a new standby to import everything; faults should not come faster than that
PHASES = ["stop", "clean", "regroup", "repair", "rollback", "resume"]


class Break(Callback):
    """Causes a fault in backward every few steps, each time on the next rank."""

    def __init__(self, kind: str, count: int, marks: Path, pause_s: float) -> None:
        self.kind, self.count, self.marks, self.pause_s = kind, count, marks, pause_s

    def on_after_backward(self, trainer: L.Trainer, *_: Any) -> None:
        step = trainer.global_step
        number, due = divmod(step, EVERY)
        mine = trainer.global_rank == number % trainer.world_size
        mark = self.marks / str(number)
        if due or not 1 <= number <= self.count or not mine or mark.exists():
            return
        mark.touch()
        time.sleep(self.pause_s)
        if self.kind == "exception":
            raise RuntimeError(f"fault {number}")
        os.kill(os.getpid(), signal.SIGKILL)


def train(kind: str, count: int, ranks: int, standby: int, marks: Path) -> None:
    torch.manual_seed(0)
    steps = (count + 1) * EVERY
    tokens = torch.randint(0, VOCABULARY, (BATCH * ranks * (steps + 1), LENGTH))
    trainer = L.Trainer(
        strategy=ReplicaZeroStrategy(max_restarts=count, standby=standby),
        accelerator="cpu",
        devices=ranks,
        max_steps=steps,
        callbacks=[Break(kind, count, marks, REFILL_S if standby else 0.0)],
        **QUIET,
    )
    trainer.fit(Module(), DataLoader(TensorDataset(tokens), batch_size=BATCH))


def measure(kind: str, count: int, ranks: int, standby: int) -> dict[str, list[float]]:
    options = ["--kind", kind, "--count", str(count), "--ranks", str(ranks), "--standby", str(standby)]
    return recoveries([sys.executable, __file__, *options], count)


def recoveries(command: list[str], count: int) -> dict[str, list[float]]:
    """Run a training that breaks ``count`` times, and return the seconds of its recoveries, in total and by phase."""
    with tempfile.TemporaryDirectory() as marks:
        done = subprocess.run(
            [*command, "--marks", marks],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            check=False,
        )
    output = done.stdout
    lines = [line for line in output.splitlines() if "recovered at step" in line]
    if done.returncode or len(lines) != count:
        raise RuntimeError(f"{len(lines)} recoveries, not {count}:\n{output[-4000:]}")
    found: dict[str, list[float]] = {"total": [float(re.search(r"in ([\d.]+) s", line)[1]) for line in lines]}
    for phase in PHASES:
        found[phase] = [float(re.search(rf"{phase} ([\d.]+)", line)[1]) for line in lines]
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--kind", choices=["SIGKILL", "exception"])
    parser.add_argument("--count", type=int, default=20)
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--standby", type=int, default=0)
    parser.add_argument("--marks", type=Path, help="directory that records which faults have happened")
    args = parser.parse_args()
    if args.marks:
        train(args.kind, args.count, args.ranks, args.standby, args.marks)
        return
    if args.kind:
        for name, seconds in measure(args.kind, args.count, args.ranks, args.standby).items():
            print(f"{name:10}{spread(seconds)}")
        return
    runs = {"exception": ("exception", 0), "SIGKILL": ("SIGKILL", 0), "SIGKILL, standby": ("SIGKILL", 1)}
    raw = {name: measure(kind, args.count, args.ranks, standby) for name, (kind, standby) in runs.items()}
    columns = ["total", *PHASES]
    rows = [[name, *(spread(found[column]) for column in columns)] for name, found in raw.items()]
    parameters = sum(p.numel() for p in Transformer().parameters())
    notes = f"""
Seconds; median and middle half of {args.count}. {args.ranks} ranks, R=2, {parameters / 1e6:.1f} M parameters, AdamW: a shard is
{12 * parameters * 2 / args.ranks / 2**20:.0f} MiB. "regroup" after a SIGKILL is the wait for the new process: the start of Python and
the import of torch and lightning; a standby has both behind it, and only runs the script. The step in flight, which is done again, is not counted.
"""
    write("recovery", "Recovery time by phase", ["fault", *columns], rows, notes, raw)


if __name__ == "__main__":
    main()
