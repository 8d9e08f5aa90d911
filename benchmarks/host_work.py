"""What being recoverable adds to a step, part by part.

    python benchmarks/host_work.py --ranks 2

It measures the CPU time of the main thread inside the functions that do this work, for models that differ only in the
size of their parameters. It does not include gloo's threads, which send the mirrors.
"""

import argparse
import statistics
import sys
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import lightning as L
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

sys.path.insert(0, str(Path(__file__).parent))
from common import QUIET, spread, write

from lightning_replica import ReplicaZeroStrategy
from lightning_replica.core.options import RecoveryOptions
from lightning_replica.launch.environment import RankEnvironment
from lightning_replica.launch.node import start_script
from lightning_replica.launch.supervisor import Supervisor
from lightning_replica.recovery.mirror import Mirrors
from lightning_replica.sharding.guard import Guard
from lightning_replica.state.host_state import LightningHostState
from lightning_replica.state.snapshot import Private

warnings.filterwarnings("ignore")
LAYERS, WARM_UP = 12, 5
WIDTHS = (256, 512, 1024)
PARTS: dict[str, list[tuple[type, str]]] = {
    "snapshots": [(LightningHostState, "begin_window"), (LightningHostState, "enter_commit")],
    "mirrors": [(Private, "pack"), (Mirrors, "begin"), (Mirrors, "settle"), (Mirrors, "digests")],
    "guard": [(Guard, name) for name in ("keep", "digest", "compare", "check", "renew")],
}


class Clock:
    """Adds up the CPU time of wrapped functions, step by step."""

    def __init__(self) -> None:
        self._inside = False
        self.now: dict[str, float] = dict.fromkeys(PARTS, 0.0)
        self.steps: list[dict[str, float]] = []
        self.began = 0.0

    def wrap(self) -> None:
        for part, places in PARTS.items():
            for owner, name in places:
                setattr(owner, name, self._timed(part, getattr(owner, name)))

    def _timed(self, part: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def timed(*args: Any, **kwargs: Any) -> Any:
            if self._inside:  # one wrapped function calls another
                return function(*args, **kwargs)
            began, self._inside = time.thread_time(), True
            try:
                return function(*args, **kwargs)
            finally:
                self.now[part] += time.thread_time() - began
                self._inside = False

        return timed

    def step(self) -> None:
        now = time.perf_counter()
        self.steps.append({**self.now, "whole": now - self.began})
        self.now, self.began = dict.fromkeys(PARTS, 0.0), now


def clock() -> Clock:
    """Return the clock. It is kept where recovery does not look: a variable of this script would be state of the run."""
    found: Clock = vars(sys)["clock_of_benchmark"]
    return found


class Module(L.LightningModule):
    """Square layers; the number of parameter tensors does not depend on their width."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.layers = nn.Sequential(*[nn.Linear(width, width) for _ in range(LAYERS)])

    def training_step(self, batch: Any, _: int) -> torch.Tensor:
        clock().step()
        loss = self.layers(batch[0]).square().mean()
        self.log("loss", loss)
        return loss

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), lr=1e-4, fused=True)


def rank_main(ranks: int, steps: int) -> None:
    torch.set_num_threads(1)
    vars(sys)["clock_of_benchmark"] = Clock()
    clock().wrap()
    rows, raw = [], {}
    for width in WIDTHS:
        clock().steps.clear()
        trainer = L.Trainer(
            strategy=ReplicaZeroStrategy(),
            accelerator="cpu",
            devices=ranks,
            max_steps=steps + WARM_UP,
            **QUIET,
        )
        data = TensorDataset(torch.randn(64 * ranks * (steps + WARM_UP), width))
        trainer.fit(Module(width), DataLoader(data, batch_size=64))
        measured = clock().steps[WARM_UP:]
        parts = [[1e3 * step[part] for step in measured] for part in PARTS]
        total = [sum(step[part] for part in PARTS) for step in measured]
        share = statistics.median(total) / statistics.median(step["whole"] for step in measured)
        megabytes = 4e-6 * LAYERS * width * (width + 1)
        rows.append([f"{megabytes:.0f}", *map(spread, parts), spread([1e3 * t for t in total]), f"{share:.2%}"])
        raw[width] = measured
    if trainer.is_global_zero:
        notes = f"""
{LAYERS} layers, {2 * LAYERS} parameters, {ranks} ranks, {steps} steps each; milliseconds of CPU time a step, median and middle half.
The share is that of the whole step on a batch of 64, which is short for so small a model.
"""
        header = ["parameters, MB", *PARTS, "together", "share of the step"]
        write("host_work", "Host work of a step", header, rows, notes, raw)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--steps", type=int, default=60)
    args = parser.parse_args()
    if RankEnvironment.current() is not None:
        rank_main(args.ranks, args.steps)
        return 0
    command = [sys.executable, *sys.argv]
    return Supervisor(start_script(lambda _: (command, None)), args.ranks, RecoveryOptions(recovery=False), print).run()


if __name__ == "__main__":
    sys.exit(main())
