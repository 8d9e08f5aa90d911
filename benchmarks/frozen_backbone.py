"""What a frozen backbone of 7 billion parameters adds to a step, beside a small model that trains.

    python benchmarks/frozen_backbone.py

The backbone has the layers of Llama 2 7B in bfloat16 and takes no part in the forward pass, so that a step is short and what
is done for recovery shows. Both ranks map it from one file, as otherwise it would need 28 GB.
"""

import argparse
import json
import sys
import tempfile
import time
import warnings
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

warnings.filterwarnings("ignore")
WIDTH, HIDDEN, LAYERS, WORDS = 4096, 11008, 32, 32000
BLOCK = [(WIDTH, WIDTH)] * 4 + [(WIDTH, HIDDEN)] * 3 + [(WIDTH,)] * 2
SHAPES = [(WORDS, WIDTH), *BLOCK * LAYERS, (WIDTH,), (WORDS, WIDTH)]
WARM_UP = 20


def mapped(file: Path, shape: tuple[int, ...]) -> torch.Tensor:
    elements = torch.Size(shape).numel()
    return torch.from_file(str(file), shared=True, size=elements, dtype=torch.bfloat16).view(shape)


class Backbone(nn.Module):
    """Parameters that are not trained, in the memory of a file."""

    def __init__(self, file: Path) -> None:
        super().__init__()
        self.weights = nn.ParameterList(
            nn.Parameter(mapped(file.with_name(f"{file.name}_{i}"), shape), requires_grad=False)
            for i, shape in enumerate(SHAPES)
        )


class Module(L.LightningModule):
    """A small model that trains, with or without a backbone; it takes the CPU time of the main thread, step by step."""

    def __init__(self, file: Path | None) -> None:
        super().__init__()
        self.backbone = Backbone(file) if file else None
        self.layers = nn.Sequential(*[nn.Linear(256, 256) for _ in range(12)])
        self.times: tuple[list[tuple[float, float]]] = ([],)  # in a tuple: the list itself is not to be put back

    def training_step(self, batch: Any, _: int) -> torch.Tensor:
        self.times[0].append((time.perf_counter(), time.thread_time()))
        return self.layers(batch[0]).square().mean()

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.layers.parameters(), lr=1e-4, fused=True)


def rank_main(file: Path | None, result: Path, ranks: int, steps: int) -> None:
    torch.set_num_threads(1)
    trainer = L.Trainer(
        strategy=ReplicaZeroStrategy(),
        accelerator="cpu",
        devices=ranks,
        max_steps=steps + WARM_UP,
        **QUIET,
    )
    module = Module(file)
    data = TensorDataset(torch.randn(64 * ranks * (steps + WARM_UP), 256))
    trainer.fit(module, DataLoader(data, batch_size=64))
    times = module.times[0][WARM_UP:]
    wall = [1e3 * (b[0] - a[0]) for a, b in zip(times, times[1:], strict=False)]
    cpu = [1e3 * (b[1] - a[1]) for a, b in zip(times, times[1:], strict=False)]
    if trainer.is_global_zero:
        result.write_text(json.dumps({"wall": wall, "cpu": cpu}))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--file", type=Path)
    parser.add_argument("--result", type=Path)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--rounds", type=int, default=3)
    args = parser.parse_args()
    if RankEnvironment.current() is not None:
        rank_main(args.file, args.result, args.ranks, args.steps)
        return 0
    raw: dict[str, dict[str, list[float]]] = {name: {"wall": [], "cpu": []} for name in ("without", "with")}
    with tempfile.TemporaryDirectory() as folder:
        result = Path(folder) / "result.json"
        for _ in range(args.rounds):
            for name, kept in raw.items():
                command = [sys.executable, *sys.argv, "--result", str(result)]
                command += ["--file", f"{folder}/backbone"] if name == "with" else []
                script = start_script(lambda _, command=command: (command, None))
                if code := Supervisor(script, args.ranks, RecoveryOptions(recovery=False), print).run():
                    return code
                for part, values in json.loads(result.read_text()).items():
                    kept[part] += values
    rows = [[name, spread(kept["wall"]), spread(kept["cpu"])] for name, kept in raw.items()]
    notes = f"{args.ranks} ranks, {args.steps} steps in each of {args.rounds} rounds; median and middle half."
    header = ["backbone", "step, ms", "CPU time of the main thread, ms"]
    write("frozen_backbone", "A frozen backbone of 7 B parameters", header, rows, notes, raw)
    return 0


if __name__ == "__main__":
    sys.exit(main())
