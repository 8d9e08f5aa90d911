"""The sharding in a loop of your own, with Lightning Fabric. A lost rank costs the steps since the last checkpoint.

python examples/fabric.py
torchrun --nproc-per-node=4 --max-restarts=3 examples/fabric.py --checkpoint run.pt --kill 2 --at 12
"""

import argparse
import os
import signal
from pathlib import Path
from typing import Any

import torch
from gpt import GPT, Text, fingerprint
from lightning.fabric import Fabric
from torch.nn import functional

from lightning_replica import FabricStrategy

FIRST_LIFE = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0") == "0"


def main() -> None:
    """Train a small GPT."""
    parser = argparse.ArgumentParser(description="Trains a small GPT with Fabric.")
    parser.add_argument("--devices", type=int, default=4, help="number of ranks")
    parser.add_argument("--replicas", type=int, default=2, help="copies of the optimizer state")
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--width", type=int, default=320, help="width of the model, a multiple of 5")
    parser.add_argument("--depth", type=int, default=8, help="layers of the model")
    parser.add_argument("--checkpoint", type=Path, help="save here, and begin here if it exists")
    parser.add_argument("--every", type=int, default=5, help="steps from one save to the next")
    parser.add_argument("--kill", type=int, metavar="RANK", help="rank that kills itself in its first life")
    parser.add_argument("--at", type=int, default=12, metavar="STEP", help="when that happens")
    args = parser.parse_args()

    fabric = Fabric(strategy=FabricStrategy(replicas=args.replicas), accelerator="cpu", devices=args.devices)
    fabric.launch()
    fabric.seed_everything(1, verbose=False)
    data = Text(length=64)
    model = GPT(args.width, args.depth)
    model, optimizer = fabric.setup(model, torch.optim.AdamW(model.parameters(), lr=1e-3))
    warmup = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: min(1.0, (step + 1) / 10))

    state: dict[str, Any] = {"model": model, "optimizer": optimizer, "warmup": warmup, "step": 0}
    if args.checkpoint and args.checkpoint.exists():
        fabric.load(args.checkpoint, state)
        fabric.print(f"resumed at step {state['step']}", flush=True)
    for step in range(state["step"], args.steps):
        # A step's batch and dropout follow from its number, so nothing more has to be saved.
        random = torch.manual_seed(step * fabric.world_size + fabric.global_rank)
        batch = torch.stack([data[int(i)] for i in torch.randint(len(data), (4,), generator=random)])
        loss = functional.cross_entropy(model(batch[:, :-1]).flatten(0, 1), batch[:, 1:].flatten())
        optimizer.zero_grad()
        fabric.backward(loss)
        if (fabric.global_rank, step) == (args.kill, args.at) and FIRST_LIFE:
            print(f"rank {args.kill} kills itself in step {step}", flush=True)
            os.kill(os.getpid(), signal.SIGKILL)
        fabric.clip_gradients(model, optimizer, max_norm=1.0)
        optimizer.step()
        warmup.step()
        if (step + 1) % 5 == 0:
            fabric.print(f"step {step + 1:4d}  loss {loss.item():.3f}", flush=True)
        if args.checkpoint and (step + 1) % args.every == 0:
            fabric.save(args.checkpoint, {**state, "step": step + 1})
    if fabric.is_global_zero:
        print(f"fingerprint {fingerprint(model)}", flush=True)


if __name__ == "__main__":
    main()
