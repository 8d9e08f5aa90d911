"""Step time, and the bytes that leave a machine, where the link between two machines is the bottleneck.

    sudo python benchmarks/thin_link.py --local 4 --mbit 300      # as root: it makes two machines of namespaces

Two machines, each with a network and processes of its own, and a link that ``tc`` limits in both directions. The
contenders train in turns on both machines; see `alternating`. Bytes are those that the first machine's interface counts.
"""

import argparse
import os
import statistics
import sys
import tempfile
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
from alternating import Setting, Turn, alternate
from common import BATCH, LENGTH, Transformer, spread, write

from lightning_replica.launch.environment import RankEnvironment
from lightning_replica.sharding.settings import EngineSettings

MACHINES, PORT = 2, 29500
CONTENDERS = [
    "replica_zero",
    "DDP",
    "DDP + ZeroRedundancyOptimizer",
    "FSDP2 HSDP",
    "replica_zero bf16",
    "DDP, bf16 hook",
]
CAP_S = 1800.0


def limited(machine: object, mbit: int) -> None:
    """Limit what a machine may send."""
    import subprocess

    shape = ["tbf", "rate", f"{mbit}mbit", "burst", "256kb", "latency", "50ms"]
    command = ["ip", "netns", "exec", machine.namespace, "tc", "qdisc", "replace", "dev", "eth0", "root", *shape]  # type: ignore[attr-defined]
    subprocess.run(command, check=True)


def measure(local: int, mbit: int, arguments: list[str]) -> None:
    """Start the ranks on two machines, and show what the first one has written."""
    sys.path.insert(0, str(Path(__file__).parents[1]))
    from tests.support.machines import NEEDS_ROOT, machines

    if NEEDS_ROOT.args[0]:
        raise SystemExit(f"{Path(__file__).name} {NEEDS_ROOT.kwargs['reason']}.")
    with tempfile.TemporaryDirectory() as place, machines(MACHINES) as made:
        for machine in made:
            limited(machine, mbit)
        for machine in made:
            program = ["run", "--nnodes", str(MACHINES), "--nproc-per-node", str(local), "--rdzv-backend", "c10d"]
            program += ["--rdzv-endpoint", f"{made[0].address}:{PORT}", "--local-addr", machine.address, __file__]
            command = [sys.executable, "-m", "lightning_replica", *program, *arguments]
            machine.start(command, Path(place) / machine.name, {**os.environ, "OMP_NUM_THREADS": "1"})
        codes = [machine.process.wait(CAP_S) for machine in made if machine.process is not None]
        print(
            *((Path(place) / machine.name).read_text() for machine in made[: 1 if not any(codes) else None]), sep="\n"
        )
        if any(codes):
            raise SystemExit(f"the machines ended with {codes}")


def report(setting: Setting, mbit: int, turns: dict[str, Turn]) -> None:
    """Write the table."""
    parameters = sum(p.numel() for p in Transformer().parameters())
    ddp, rows = turns["DDP"].seconds, []
    for name, turn in sorted(turns.items(), key=lambda item: item[0].startswith("replica_zero")):
        ratios = [ours / theirs for ours, theirs in zip(turn.seconds, ddp, strict=False)]
        sent = statistics.median(turn.bytes) / (4 * parameters)
        rows.append([name, spread([1e3 * s for s in turn.seconds]), spread(ratios), f"{sent:.3f}"])
    bucket_mib = EngineSettings(bucket_bytes=setting.bucket_bytes).bucket_bytes_on(setting.nodes, on_host=True) / 2**20
    notes = f"""
{parameters / 1e6:.1f} M parameters, fp32, fused AdamW, gloo, {MACHINES} machines of {setting.local} ranks, R=2, 1 thread a rank, batch
{BATCH} x {LENGTH}. The link carries {mbit} Mbit/s in each direction. replica_zero has buckets of {bucket_mib:g} MiB, DDP its
own default (25 MiB). {len(ddp)} rounds; median and middle half. Ratios are those of steps of the same round. Bytes leave the first
machine in a step, in units of the parameters' size (4 bytes each), with headers; the least for R=2 holders on different
machines is 1.
"""
    name = f"thin_link_{setting.nodes}x{setting.local}_{mbit}"
    raw = {name: {"seconds": turn.seconds, "bytes": turn.bytes} for name, turn in turns.items()}
    title = f"Step time, {setting.nodes} machines of {setting.local} ranks, {mbit} Mbit/s"
    write(name, title, ["", "ms", "of DDP", "bytes out of a machine"], rows, notes, raw)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--local", type=int, default=4, help="ranks on each machine")
    parser.add_argument("--mbit", type=int, default=300, help="what the link carries in each direction, in Mbit/s")
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--bucket-mib", type=float, help="size of replica_zero's buckets (default: its own choice)")
    parser.add_argument("--contenders", nargs="+", default=CONTENDERS)
    args = parser.parse_args()
    if RankEnvironment.current() is None:
        measure(args.local, args.mbit, sys.argv[1:])
        return 0
    bucket_bytes = int(args.bucket_mib * 2**20) if args.bucket_mib else None
    setting = Setting(args.local, MACHINES, args.steps, False, "eth0", bucket_bytes)
    turns = alternate(args.contenders, setting)
    if os.environ["RANK"] == "0":
        report(setting, args.mbit, turns)
    return 0


if __name__ == "__main__":
    sys.exit(main())
