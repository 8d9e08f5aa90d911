"""What a killed rank costs, seen from outside: replica_zero, torchrun with a checkpoint every step, and torchft.

    pip install torchft      # the table leaves it out if it is missing
    python benchmarks/recovery_peers.py

Every system trains the same model with the same optimizer on four CPU ranks over gloo. Every few steps, a rank kills
itself in its backward pass. All processes record when each of their steps ended. The cost of a kill is the time from
the end of the last good step to the end of the next good step, minus the median step. torchft continues without the
lost rank, so the table also shows the time until all ranks are back.
"""

import argparse
import json
import math
import os
import signal
import subprocess
import sys
import tempfile
import time
import warnings
from pathlib import Path
from statistics import median
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

sys.path.insert(0, str(Path(__file__).parent))
from common import BATCH, LENGTH, QUIET, RESULTS, VOCABULARY, Transformer, loss_of, spread, write

warnings.filterwarnings("ignore")
EVERY = 8  # steps between kills
RANKS = 4


class Trace:
    """Records when the steps of a process ended, and kills the process when it is its turn."""

    def __init__(self, place: Path, rank: int, kills: int) -> None:
        self.place, self.rank, self.kills = place, rank, kills
        self.file = (place / f"steps{rank}").open("a")

    def kill(self, step: int) -> None:
        """Kill this process in the step from ``step`` to ``step + 1``, if a kill of this rank is due there."""
        number, due = divmod(step, EVERY)
        mark = self.place / f"kill{number}"
        if due or not 1 <= number <= self.kills or self.rank != number % RANKS or mark.exists():
            return
        mark.touch()
        os.kill(os.getpid(), signal.SIGKILL)

    def ended(self, step: int, world_size: int) -> None:
        """Record that the step that led to ``step`` is done."""
        self.file.write(f"{step} {time.clock_gettime_ns(time.CLOCK_MONOTONIC)} {world_size}\n")
        self.file.flush()


def batches(rank: int, steps: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(rank)
    return torch.randint(0, VOCABULARY, (steps, BATCH, LENGTH), generator=generator)


def parts() -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(0)
    model = Transformer()
    return model, torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)


# A worker of each system


def with_torchrun(trace: Trace, steps: int) -> None:
    """Train with DDP: rank 0 writes weights and optimizer after every step, and torchrun restarts all ranks."""
    dist.init_process_group("gloo")
    model, optimizer = parts()
    wrapped, latest = nn.parallel.DistributedDataParallel(model), trace.place / "latest.pt"
    first, data = 0, batches(trace.rank, steps)
    if latest.exists():
        saved = torch.load(latest, weights_only=True, mmap=True)
        model.load_state_dict(saved["model"])
        optimizer.load_state_dict(saved["optimizer"])
        first = saved["step"]
    for step in range(first, steps):
        optimizer.zero_grad()
        loss = loss_of(wrapped, data[step])
        trace.kill(step)
        loss.backward()
        optimizer.step()
        if trace.rank == 0:
            saved = {"step": step + 1, "model": model.state_dict(), "optimizer": optimizer.state_dict()}
            torch.save(saved, trace.place / "next.pt")
            (trace.place / "next.pt").rename(latest)
        dist.barrier()
        trace.ended(step + 1, RANKS)
    dist.destroy_process_group()


def with_torchft(trace: Trace, steps: int, tuned: bool) -> None:
    """Train with four replica groups of one rank: a lost one is dropped, and its successor gets another's state."""
    from datetime import timedelta

    from torchft import DistributedDataParallel, Manager, Optimizer, ProcessGroupGloo

    model, inner = parts()
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    timeout = timedelta(seconds=10 if tuned else 60)

    def load(state: dict[str, Any]) -> None:
        model.load_state_dict(state["model"])
        inner.load_state_dict(state["optimizer"])

    manager = Manager(
        pg=ProcessGroupGloo(timeout=timeout),
        load_state_dict=load,
        state_dict=lambda: {"model": model.state_dict(), "optimizer": inner.state_dict()},
        min_replica_size=2,
        timeout=timeout,
        rank=0,
        world_size=1,
        store_addr="127.0.0.1",
        store_port=store.port,
        replica_id=f"replica_{trace.rank}_",
        hostname="127.0.0.1",
    )
    wrapped, optimizer, data = (
        DistributedDataParallel(manager, model),
        Optimizer(manager, inner),
        batches(trace.rank, steps),
    )
    try:
        while manager.current_step() < steps:
            step = manager.current_step()
            optimizer.zero_grad()
            loss = loss_of(wrapped, data[step])
            trace.kill(step)
            loss.backward()
            optimizer.step()
            if manager.current_step() > step:
                trace.ended(manager.current_step(), manager.num_participants())
    finally:
        manager.shutdown(wait=False)


def with_replica_zero(trace: Trace, steps: int, standby: int) -> None:
    """Train as a user does, with a LightningModule and a Trainer."""
    import lightning as L
    from lightning.pytorch.callbacks import Callback
    from torch.utils.data import DataLoader, TensorDataset

    from lightning_replica import ReplicaZeroStrategy

    class Module(L.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.model, self.inner = parts()

        def training_step(self, batch: Any, _: int) -> torch.Tensor:
            loss = loss_of(self.model, batch[0][0])
            trace.kill(self.trainer.global_step)
            return loss

        def configure_optimizers(self) -> Any:
            return self.inner

    class Ended(Callback):
        def on_train_batch_end(self, trainer: L.Trainer, *_: Any) -> None:
            trace.ended(trainer.global_step, trainer.world_size)

    trainer = L.Trainer(
        strategy=ReplicaZeroStrategy(max_restarts=trace.kills, standby=standby),
        accelerator="cpu",
        devices=RANKS,
        max_steps=steps,
        use_distributed_sampler=False,
        callbacks=[Ended()],
        **QUIET,
    )
    trainer.fit(Module(), DataLoader(TensorDataset(batches(trace.rank, steps + 1))))


# Running the systems


def run(system: str, kills: int, place: Path) -> None:
    """Run one training with all its kills."""
    own = [__file__, "--system", system, "--kills", str(kills), "--place", str(place)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    if system == "torchrun":
        launcher = [
            "-m",
            "torch.distributed.run",
            "--standalone",
            "--nproc-per-node",
            str(RANKS),
            "--monitor-interval",
            "0.1",
        ]
        command = [sys.executable, *launcher, "--max-restarts", str(kills), *own]
        # Otherwise restarted workers read the addresses of their predecessors and hang (torch 2.13, --standalone).
        environment["TORCH_DISABLE_SHARE_RDZV_TCP_STORE"] = "1"
        finished(
            subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
        )
    elif system.startswith("torchft"):
        supervise_torchft(own, environment, system.endswith("tuned"))
    else:
        command = [sys.executable, *own]
        finished(
            subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
        )


def finished(process: "subprocess.Popen[str]") -> None:
    output = process.communicate()[0]
    if process.returncode:
        raise RuntimeError(output[-4000:])


def supervise_torchft(own: list[str], environment: dict[str, str], tuned: bool) -> None:
    """Start four processes, and restart at once any that dies."""
    from torchft.coordination import LighthouseServer

    # Without "tuned", torchft waits for a minute at the start and after every loss: its default for joining.
    options = {"join_timeout_ms": 200, "heartbeat_timeout_ms": 500} if tuned else {}
    lighthouse = LighthouseServer(bind="127.0.0.1:0", min_replicas=2, **options)
    environment = {**environment, "TORCHFT_LIGHTHOUSE": lighthouse.address()}

    def start(rank: int) -> "subprocess.Popen[bytes]":
        return subprocess.Popen(
            [sys.executable, *own],
            env={**environment, "RANK": str(rank)},
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )

    processes = {rank: start(rank) for rank in range(RANKS)}
    while all(process.poll() != 0 for process in processes.values()):
        for rank, process in processes.items():
            if process.poll() is not None:
                processes[rank] = start(rank)
        time.sleep(0.005)
    for process in processes.values():  # a process that comes late finds no quorum
        process.kill()
        process.wait()
    lighthouse.shutdown()


def read(place: Path, kills: int) -> dict[str, list[float]]:
    """Return the seconds of each kill, until the next good step and until all ranks are back, and of normal steps."""
    first: dict[int, float] = {}  # when the first rank ended each step
    whole: dict[int, float] = {}
    for rank in range(RANKS):
        for line in (place / f"steps{rank}").read_text().splitlines():
            step, nanoseconds, world_size = map(int, line.split())
            at = nanoseconds / 1e9
            first[step] = min(at, first.get(step, at))
            if world_size == RANKS:
                whole[step] = min(at, whole.get(step, at))
    at_kill = [number * EVERY for number in range(1, kills + 1)]
    quiet = [s for s in first if s - 1 in first and all(not kill < s <= kill + 3 for kill in at_kill)]
    normal = [first[s] - first[s - 1] for s in quiet if s > 2]
    step_s = median(normal)
    again = [min((t for s, t in whole.items() if s > kill), default=float("nan")) for kill in at_kill]
    return {
        "recovery": [first[kill + 1] - first[kill] - step_s for kill in at_kill],
        "whole": [at - first[kill] - step_s for at, kill in zip(again, at_kill, strict=True)],
        "step": normal,
    }


def systems() -> list[str]:
    found = ["replica_zero", "replica_zero, standby", "torchrun"]
    try:
        import torchft  # noqa: F401
    except ImportError:
        return found
    return [*found, "torchft", "torchft, tuned"]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--kills", type=int, default=20)
    parser.add_argument("--system", help="run one worker of this system")
    parser.add_argument("--only", action="append", help="measure only this system, and keep the figures of the others")
    parser.add_argument("--place", type=Path)
    args = parser.parse_args()
    steps = (args.kills + 1) * EVERY
    if args.system:
        torch.set_num_threads(1)
        rank = int(os.environ.get("LOCAL_RANK", os.environ.get("RANK", "0")))
        trace = Trace(args.place, rank, args.kills)
        if args.system == "torchrun":
            with_torchrun(trace, steps)
        elif args.system.startswith("torchft"):
            with_torchft(trace, steps, args.system.endswith("tuned"))
        else:
            with_replica_zero(trace, steps, standby=2 if args.system.endswith("standby") else 0)
        return
    file = RESULTS / "recovery_peers.json"
    raw = json.loads(file.read_text()) if args.only and file.exists() else {}
    for system in args.only or systems():
        with tempfile.TemporaryDirectory() as place:
            run(system, args.kills, Path(place))
            raw[system] = read(Path(place), args.kills)
        show(raw, args.kills)


def show(raw: dict[str, Any], kills: int) -> None:
    rows = [[name, spread(f["recovery"]), in_again(f["whole"]), spread(f["step"])] for name, f in raw.items()]
    header = ["system", "until the next good step", "until all ranks are in again", "a normal step"]
    write("recovery_peers", "What a killed rank costs", header, rows, notes(kills), raw)


def in_again(whole: list[float]) -> str:
    """Return the time until all ranks were back, over the kills after which that happened before the next kill."""
    seen = [each for each in whole if not math.isnan(each)]
    return (
        spread(seen)
        if len(seen) == len(whole)
        else f"{spread(seen) if seen else 'not seen'} ({len(seen)} of {len(whole)})"
    )


def notes(kills: int) -> str:
    parameters = sum(p.numel() for p in Transformer().parameters())
    return f"""
Seconds; median and middle half of {kills} kills, one every {EVERY} steps, each of another rank, in its backward pass.
{RANKS} ranks, {parameters / 1e6:.1f} M parameters, fused AdamW. From the end of the last good step to the end of the next, less the
median step, by clocks of the training itself. torchrun: DDP, rank 0 writes a checkpoint after every step (that is in its
normal step), torchrun starts all ranks again. torchft: four replica groups, the lost one is started again at once;
survivors go on with three, so the next good step is one of a smaller batch, and the run is not the untouched one any
more; "tuned" is join_timeout 0.2 s, heartbeat_timeout 0.5 s, timeout 10 s. After replica_zero the run is the untouched one,
to the last bit. "All ranks are in again": before the next kill; where that was not so each time, how often it was.
"""


if __name__ == "__main__":
    main()
