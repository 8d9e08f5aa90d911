"""Step time and bytes on the wire of `replica_zero` and other strategies in Lightning, alternating step by step.

    python benchmarks/step_time.py --ranks 4 --steps 40
    python benchmarks/step_time.py --ranks 4 --steps 40 --sockets    # replica_zero without shared memory
    python benchmarks/step_time.py --ranks 1 --accelerator cuda

The contenders make their steps in turns; see `alternating`. Bytes are those that the loopback interface counts, divided
by the number of ranks.
"""

import argparse
import os
import statistics
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
from alternating import Setting, Turn, alternate
from common import BATCH, LENGTH, Transformer, spread, write

from lightning_replica.core.options import RecoveryOptions
from lightning_replica.launch.environment import RankEnvironment
from lightning_replica.launch.node import start_script
from lightning_replica.launch.supervisor import Supervisor

SHARED = """replica_zero reads the other ranks' memory on this one machine, as it does by default; the others have only
sockets. Between machines the table of the same name with `_sockets` counts."""
SOCKETS = "replica_zero sends through sockets as the others do (shared_memory=False)."
CONTENDERS = ["replica_zero", "DDP", "DDP, bucket views", "DDP + ZeroRedundancyOptimizer", "FSDP2 HSDP"]


def report(ranks: int, sockets: bool, accelerator: str, turns: dict[str, Turn]) -> None:
    parameters = sum(p.numel() for p in Transformer().parameters())
    ddp = turns["DDP"].seconds
    rows = []
    for name in [*list(turns)[1:], CONTENDERS[0]]:
        turn = turns[name]
        ratios = [ours / theirs for ours, theirs in zip(turn.seconds, ddp, strict=False)]
        sent = statistics.median(turn.bytes) / (4 * parameters * ranks)
        rows.append([name, spread([1e3 * s for s in turn.seconds]), spread(ratios), f"{sent:.3f}"])
    replicas = min(2, ranks)
    bound = (2 * ranks - 2) / ranks
    where = "gloo" if accelerator == "cpu" else f"on {accelerator}"
    notes = f"""
{parameters / 1e6:.1f} M parameters, fp32, fused AdamW, {where}, {ranks} ranks, R={replicas}, 1 thread a rank, batch {BATCH} x {LENGTH}.
{len(ddp)} rounds; median and middle half. Ratios are those of steps of the same round. Bytes are sent per rank and
step through sockets, in units of the parameters' size (4 bytes each); the bound for R={replicas} holders of every shard is
[g(N+R-2) + p(N-R)] / N = {bound:.3f}. {notes_on(sockets, accelerator)}
"""
    name = f"step_time_{ranks}{'_sockets' if sockets else ''}{'' if accelerator == 'cpu' else f'_{accelerator}'}"
    raw = {name: {"seconds": turn.seconds, "bytes": turn.bytes} for name, turn in turns.items()}
    write(name, f"Step time, {ranks} ranks", ["", "ms", "of DDP", "bytes"], rows, notes, raw)


def notes_on(sockets: bool, accelerator: str) -> str:
    if accelerator != "cpu":
        return "Bytes between devices are not counted."
    return SOCKETS if sockets else SHARED


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--bucket-mib", type=float, help="size of replica_zero's buckets (default: its own choice)")
    parser.add_argument("--sockets", action="store_true", help="run replica_zero with shared_memory=False")
    parser.add_argument("--accelerator", default="cpu", help="cpu, cuda, npu")
    args = parser.parse_args()
    if RankEnvironment.current() is not None:
        bucket_bytes = int(args.bucket_mib * 2**20) if args.bucket_mib else None
        setting = Setting(args.ranks, 1, args.steps, args.sockets, "lo", bucket_bytes, args.accelerator)
        turns = alternate(CONTENDERS if args.ranks > 1 else CONTENDERS[:-1], setting)
        if os.environ["LOCAL_RANK"] == "0":
            report(args.ranks, args.sockets, args.accelerator, turns)
        return 0
    command = [sys.executable, *sys.argv]
    return Supervisor(start_script(lambda _: (command, None)), args.ranks, RecoveryOptions(recovery=False), print).run()


if __name__ == "__main__":
    sys.exit(main())
