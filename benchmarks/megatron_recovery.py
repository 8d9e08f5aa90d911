"""Recovery time of a model that megatron-core divides, beside the same model undivided: TP 2 x PP 2 x DP 2 and DP 8.

    python benchmarks/megatron_recovery.py

Both train the GPT of `megatron_step.py` on 8 ranks. Faults and figures are those of `recovery.py`. Needs megatron-core
and einops. It runs on CPUs, with the stand-ins of examples/megatron_cpu.py for what megatron-core asks of CUDA.
"""

import argparse
import sys
from pathlib import Path
from typing import Any

import torch

sys.path[:0] = [str(Path(__file__).parent), str(Path(__file__).parents[1] / "examples")]
import lightning as L
import megatron_cpu
from common import QUIET, spread, write
from megatron_step import BATCH, LENGTH, MICRO, WORDS, build, forward_step
from recovery import EVERY, PHASES, REFILL_S, Break, recoveries
from torch.utils.data import DataLoader, TensorDataset

from lightning_replica import MegatronReplicaStrategy

RANKS = 8
WORLDS = {"DP 8": (1, 1), "TP 2 x PP 2 x DP 2": (2, 2)}
FAULTS = {"exception": ("exception", 0), "SIGKILL": ("SIGKILL", 0), "SIGKILL, standby": ("SIGKILL", 1)}


class Module(L.LightningModule):
    """The GPT."""

    def configure_model(self) -> None:
        if not hasattr(self, "model"):
            self.model = build(self.trainer.strategy.model_parallel_config)

    def training_step(self, batch: Any, _: int) -> torch.Tensor:
        return self.trainer.strategy.forward_backward(forward_step, batch)

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), lr=1e-4, fused=True)


def train(sizes: tuple[int, int], kind: str, count: int, standby: int, marks: Path) -> None:
    """Train, and break every few steps."""
    megatron_cpu.install()
    megatron_cpu.pass_for_cuda()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    steps = (count + 1) * EVERY
    trainer = L.Trainer(
        strategy=MegatronReplicaStrategy(*sizes, micro_batch_size=MICRO, max_restarts=count, standby=standby),
        accelerator="cpu",
        devices=RANKS,
        max_steps=steps,
        callbacks=[Break(kind, count, marks, 2 * REFILL_S if standby else 0.0)],
        **QUIET,
    )
    tokens = torch.randint(0, WORDS, (BATCH * RANKS * (steps + 1), LENGTH))
    trainer.fit(Module(), DataLoader(TensorDataset(tokens), batch_size=BATCH))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--count", type=int, default=10)
    parser.add_argument("--kind", choices=["SIGKILL", "exception"])
    parser.add_argument("--standby", type=int, default=0)
    parser.add_argument("--world", choices=list(WORLDS))
    parser.add_argument("--marks", type=Path, help="directory that records which faults have happened")
    args = parser.parse_args()
    if args.marks:
        train(WORLDS[args.world], args.kind, args.count, args.standby, args.marks)
        return
    raw = {}
    for fault, (kind, standby) in FAULTS.items():
        for world in WORLDS:
            options = ["--count", str(args.count), "--kind", kind, "--standby", str(standby), "--world", world]
            raw[f"{fault}; {world}"] = recoveries([sys.executable, __file__, *options], args.count)
    columns = ["total", *PHASES]
    rows = [[name, *(spread(found[column]) for column in columns)] for name, found in raw.items()]
    notes = f"""
Seconds; median and middle half of {args.count}. {RANKS} ranks, R=2, the GPT of megatron_step.py, AdamW(fused=True). "regroup" after a
SIGKILL is the wait for the new process, which imports torch, lightning and megatron-core; a standby has that behind it.
"""
    write("megatron_recovery", "Recovery time of a divided model", ["fault", *columns], rows, notes, raw)


if __name__ == "__main__":
    main()
