"""Step time and memory of DDP with `ReplicaOptimizer`, beside torch's `ZeroRedundancyOptimizer`; without Lightning.

    python benchmarks/zero_redundancy.py --ranks 4
    python benchmarks/zero_redundancy.py --ranks 4 --sockets    # ReplicaOptimizer without shared memory

Steps: the contenders take turns in the same processes, one step each in every round, with a barrier before and after it.
Ratios are those of steps of the same round. Memory: each contender by itself, in new processes, with the model of
`memory`: the proportional set size (Pss) after the third step, minus that before the model was built.
"""

import argparse
import os
import sys
import tempfile
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

sys.path.insert(0, str(Path(__file__).parent))
import torch
import torch.distributed as dist
from common import BATCH, LENGTH, VOCABULARY, Transformer, loss_of, spread, write
from memory import DEPTH, PARAMETERS, WIDTH, memory
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks import ddp_zero_hook
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.nn.parallel import DistributedDataParallel as DDP

from lightning_replica import ReplicaOptimizer

BASE = "DDP + ZeroRedundancyOptimizer"
OVERLAP = f"{BASE}, overlap_with_ddp"
CONTENDERS = ["DDP + AdamW", BASE, OVERLAP, "DDP + ReplicaOptimizer, R=1", "DDP + ReplicaOptimizer, R=2"]
WARM_UP = 4  # an overlapped optimizer makes its first update in the third step
OPTIONS = {"lr": 1e-4}

Step = Callable[[Tensor], None]


def build(contender: str, module: nn.Module, loss: Callable[[nn.Module, Tensor], Tensor], sockets: bool) -> Step:
    """Return what makes one step of a contender."""
    ddp = DDP(module, gradient_as_bucket_view=True)
    optimizer = optimizer_of(contender, module, sockets)
    if contender == OVERLAP:
        # torch refuses this over gloo, as it "may meet hangs". In this benchmark it has met none.
        with mock.patch.object(ddp_zero_hook.dist, "get_backend", return_value="nccl"):
            hook = ddp_zero_hook.hook_with_zero_step(allreduce_hook, ddp, optimizer)
        ddp.register_comm_hook(None, hook)

    def step(batch: Tensor) -> None:
        optimizer.zero_grad()
        loss(ddp, batch).backward()
        if contender != OVERLAP:
            optimizer.step()

    return step


def optimizer_of(contender: str, module: nn.Module, sockets: bool) -> Any:
    if contender.startswith("DDP + ReplicaOptimizer"):
        replicas, shared = int(contender[-1]), not sockets
        return ReplicaOptimizer(
            module.parameters(), torch.optim.AdamW, replicas, shared_memory=shared, fused=True, **OPTIONS
        )
    if contender == OVERLAP:
        return ZeroRedundancyOptimizer(module.parameters(), torch.optim.AdamW, overlap_with_ddp=True, **OPTIONS)
    if contender == BASE:
        return ZeroRedundancyOptimizer(module.parameters(), torch.optim.AdamW, fused=True, **OPTIONS)
    return torch.optim.AdamW(module.parameters(), fused=True, **OPTIONS)


def time_steps(rank: int, contenders: list[str], rounds: int, sockets: bool) -> dict[str, list[float]]:
    """Return the seconds of every step that is measured."""
    steps = {}
    for contender in contenders:
        torch.manual_seed(0)
        steps[contender] = build(contender, Transformer(), loss_of, sockets)
    seconds: dict[str, list[float]] = {contender: [] for contender in contenders}
    for number in range(WARM_UP + rounds):
        batch = torch.randint(VOCABULARY, (BATCH, LENGTH), generator=torch.Generator().manual_seed(number * 99 + rank))
        for contender, step in steps.items():
            dist.barrier()
            began = time.perf_counter()
            step(batch)
            dist.barrier()
            if number >= WARM_UP:
                seconds[contender].append(time.perf_counter() - began)
    return seconds


def memory_of(rank: int, contender: str, sockets: bool) -> float:
    """Return the bytes per parameter, averaged over the ranks."""
    before = memory()
    module = nn.Sequential(*[nn.Linear(WIDTH, WIDTH) for _ in range(DEPTH)])
    step = build(contender, module, lambda ddp, batch: ddp(batch).square().mean(), sockets)
    for _ in range(WARM_UP):
        step(torch.randn(2, WIDTH))
    dist.barrier()
    taken = torch.tensor(float(memory() - before))
    dist.all_reduce(taken)
    return float(taken) / dist.get_world_size() / PARAMETERS


def work(rank: int, ranks: int, folder: str, task: Callable[..., Any], args: tuple[Any, ...]) -> None:
    """What a rank does; the first leaves the result."""
    warnings.filterwarnings("ignore")
    torch.set_num_threads(1)
    dist.init_process_group("gloo", store=dist.FileStore(f"{folder}/store", ranks), rank=rank, world_size=ranks)
    result = task(rank, *args)
    if rank == 0:
        torch.save(result, f"{folder}/result")
    dist.barrier()
    dist.destroy_process_group()


def run(ranks: int, task: Callable[..., Any], *args: Any) -> Any:
    """Run a task in new processes and return the result of the first."""
    with tempfile.TemporaryDirectory() as folder:
        torch.multiprocessing.spawn(work, (ranks, folder, task, args), ranks)
        return torch.load(f"{folder}/result")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--rounds", type=int, default=40)
    parser.add_argument("--sockets", action="store_true", help="ReplicaOptimizer with shared_memory=False")
    parser.add_argument("--contenders", nargs="+", default=CONTENDERS, choices=CONTENDERS)
    parser.add_argument("--no-memory", action="store_true", help="measure steps only, and write nothing")
    args = parser.parse_args()
    seconds = run(args.ranks, time_steps, args.contenders, args.rounds, args.sockets)
    if args.no_memory:
        for name, of in seconds.items():
            ratios = [ours / theirs for ours, theirs in zip(of, seconds[BASE], strict=True)]
            print(f"{name:45} {spread([1e3 * s for s in of])} ms, {spread(ratios)}")
        return
    taken = {name: run(args.ranks, memory_of, name, args.sockets) for name in args.contenders}
    report(args.ranks, args.sockets, seconds, taken)


def report(ranks: int, sockets: bool, seconds: dict[str, list[float]], taken: dict[str, float]) -> None:
    rows = []
    for name, of in seconds.items():
        ratios = [ours / theirs for ours, theirs in zip(of, seconds[BASE], strict=True)]
        each = f"{taken[name]:.2f}", f"{taken[name] / taken[BASE]:.2f}"
        rows.append([name, spread([1e3 * s for s in of]), spread(ratios), *each])
    count = sum(p.numel() for p in Transformer().parameters())
    how = "sends through sockets, as the others do" if sockets else "reads the other ranks' memory on this one machine"
    notes = f"""
Steps: {count / 1e6:.1f} M parameters, fp32, AdamW (fused, but not where it overlaps: torch's functional form is not), gloo, {ranks} ranks, 1
thread a rank, batch {BATCH} x {LENGTH}, {len(seconds[BASE])} rounds; median and middle half. Memory: {PARAMETERS / 1e6:.0f} M parameters, bytes per parameter
and rank. All have `gradient_as_bucket_view=True`. ReplicaOptimizer {how}.
"""
    header = ["", "ms", "of DDP + ZeRO", "bytes", "of DDP + ZeRO"]
    name = f"zero_redundancy_{ranks}{'_sockets' if sockets else ''}"
    write(name, f"Beside ZeroRedundancyOptimizer, {ranks} ranks", header, rows, notes, {"s": seconds, "bytes": taken})


if __name__ == "__main__":
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    main()
