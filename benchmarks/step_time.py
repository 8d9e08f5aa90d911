"""Step time and bytes on the wire of `replica_zero` and other strategies in Lightning, alternating step by step.

    python benchmarks/step_time.py --ranks 4 --steps 40
    python benchmarks/step_time.py --ranks 4 --steps 40 --sockets    # replica_zero without shared memory

Every contender is a Trainer in a thread of its own, in the same processes. The contenders pass a baton round: the one
that holds it makes one step while the others sleep. So all of them see the same noise of the machine, and only steps of
the same round are compared. Bytes are those that the loopback interface counts while a contender holds the baton, with
headers, divided by the number of ranks.
"""

import argparse
import os
import statistics
import sys
import threading
import time
import warnings
from pathlib import Path
from typing import Any

import lightning as L
import torch
import torch.distributed as dist
from lightning.pytorch.strategies import DDPStrategy
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.utils.data import DataLoader, TensorDataset

sys.path.insert(0, str(Path(__file__).parent))
from common import BATCH, LENGTH, VOCABULARY, Transformer, loss_of, spread, write

from lightning_replica import ReplicaZeroStrategy
from lightning_replica.core.options import RecoveryOptions
from lightning_replica.launch.environment import RankEnvironment
from lightning_replica.launch.node import start_script
from lightning_replica.launch.supervisor import Supervisor

warnings.filterwarnings("ignore")
WARM_UP = 3
SHARED = """replica_zero reads the other ranks' memory on this one machine, as it does by default; the others have only
sockets. Between machines the table of the same name with `_sockets` counts."""
SOCKETS = "replica_zero sends through sockets as the others do (shared_memory=False)."
CONTENDERS = ["DDP", "DDP, bucket views", "DDP + ZeroRedundancyOptimizer", "FSDP2 HSDP", "replica_zero"]


class Baton:
    """Lets one contender run at a time, in rounds."""

    def __init__(self, contenders: int) -> None:
        self._turns = [threading.Semaphore(0) for _ in range(contenders)]
        self._left = list(range(contenders))
        self._turns[0].release()

    def take(self, number: int) -> None:
        self._turns[number].acquire()

    def pass_on(self, number: int) -> None:
        following = self._left[(self._left.index(number) + 1) % len(self._left)]
        self._turns[following].release()

    def leave(self, number: int) -> None:
        others = len(self._left) > 1
        if others:
            self.pass_on(number)
        self._left.remove(number)


class Turn:
    """Passes the baton on before every step, and measures the time and the bytes in between.

    The training step calls it, and not a callback: a user's batch hook might change weights, so replica_zero would
    check them.
    """

    def __init__(self, number: int, baton: Baton) -> None:
        self.number, self.baton = number, baton
        self.seconds: list[float] = []
        self.bytes: list[float] = []

    def step(self, trainer: L.Trainer) -> None:
        dist.barrier()
        if trainer.global_step > WARM_UP:
            self.seconds.append(time.perf_counter() - self.began)
            self.bytes.append((loopback_bytes() - self.sent) / trainer.world_size)
        self.baton.pass_on(self.number)
        self.baton.take(self.number)
        dist.barrier()
        self.began, self.sent = time.perf_counter(), loopback_bytes()


class Module(L.LightningModule):
    """The model under one contender."""

    def __init__(self, contender: str, turn: Turn) -> None:
        super().__init__()
        self.contender, self.model = contender, Transformer()
        self.turn = (turn,)

    def training_step(self, batch: Any, _: int) -> torch.Tensor:
        self.turn[0].step(self.trainer)
        return loss_of(self.model, batch[0])

    def configure_optimizers(self) -> Any:
        if self.contender == "DDP + ZeroRedundancyOptimizer":
            return ZeroRedundancyOptimizer(self.parameters(), torch.optim.AdamW, lr=1e-4, fused=True)
        return torch.optim.AdamW(self.parameters(), lr=1e-4, fused=True)


class HSDPStrategy(DDPStrategy):
    """Lightning's DDP strategy with FSDP2 in place of the wrapper: two replicas, each of them sharded."""

    def configure_ddp(self) -> None:
        module = self.lightning_module
        assert module is not None
        world = dist.get_world_size()
        mesh = init_device_mesh("cpu", (2, world // 2), mesh_dim_names=("replicate", "shard"))
        for block in module.model.blocks:
            fully_shard(block, mesh=mesh, reshard_after_forward=False)
        fully_shard(module.model, mesh=mesh, reshard_after_forward=False)


def strategy_of(contender: str, sockets: bool) -> Any:
    if contender == "replica_zero":
        return ReplicaZeroStrategy(replicas=2, shared_memory=not sockets)
    if contender == "FSDP2 HSDP":
        return HSDPStrategy()
    return DDPStrategy(gradient_as_bucket_view=contender == "DDP, bucket views")


def loopback_bytes() -> int:
    """Return the bytes sent over the loopback interface since boot."""
    for line in Path("/proc/net/dev").read_text().splitlines():
        if line.strip().startswith("lo:"):
            return int(line.split()[9])
    return 0


def fit(number: int, turn: Turn, baton: Baton, ranks: int, steps: int, sockets: bool) -> None:
    baton.take(number)
    contender = CONTENDERS[number]
    torch.manual_seed(0)
    tokens = torch.randint(0, VOCABULARY, (BATCH * ranks * (steps + WARM_UP + 2), LENGTH))
    trainer = L.Trainer(
        strategy=strategy_of(contender, sockets),
        accelerator="cpu",
        devices=ranks,
        max_steps=steps + WARM_UP + 1,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(Module(contender, turn), DataLoader(TensorDataset(tokens), batch_size=BATCH))
    baton.leave(number)


def rank_main(ranks: int, steps: int, sockets: bool) -> None:
    torch.set_num_threads(1)
    baton = Baton(len(CONTENDERS))
    # replica_zero goes first because it opens the default process group; Lightning's DDP finds it open.
    CONTENDERS.insert(0, CONTENDERS.pop())
    turns = [Turn(number, baton) for number in range(len(CONTENDERS))]
    threads = [
        threading.Thread(target=fit, args=(number, turn, baton, ranks, steps, sockets))
        for number, turn in enumerate(turns)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if os.environ["LOCAL_RANK"] == "0":
        report(ranks, sockets, dict(zip(CONTENDERS, turns, strict=True)))


def report(ranks: int, sockets: bool, turns: dict[str, Turn]) -> None:
    parameters = sum(p.numel() for p in Transformer().parameters())
    ddp = turns["DDP"].seconds
    rows = []
    for name in [*CONTENDERS[1:], CONTENDERS[0]]:
        turn = turns[name]
        ratios = [ours / theirs for ours, theirs in zip(turn.seconds, ddp, strict=False)]
        sent = statistics.median(turn.bytes) / (4 * parameters)
        rows.append([name, spread([1e3 * s for s in turn.seconds]), spread(ratios), f"{sent:.3f}"])
    bound = (ranks + ranks - 2) / ranks
    notes = f"""
{parameters / 1e6:.1f} M parameters, fp32, fused AdamW, gloo, {ranks} ranks, R=2, 1 thread a rank, batch {BATCH} x {LENGTH}.
{len(ddp)} rounds; median and middle half. Ratios are those of steps of the same round. Bytes are sent per rank and
step through sockets, in units of the parameters' size (4 bytes each); the bound for R=2 holders of every shard is
[g(N+R-2) + p(N-R)] / N = {bound:.3f}. {SOCKETS if sockets else SHARED}
"""
    name = f"step_time_{ranks}{'_sockets' if sockets else ''}"
    raw = {name: {"seconds": turn.seconds, "bytes": turn.bytes} for name, turn in turns.items()}
    write(name, f"Step time, {ranks} ranks", ["", "ms", "of DDP", "bytes"], rows, notes, raw)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--sockets", action="store_true", help="run replica_zero with shared_memory=False")
    args = parser.parse_args()
    if RankEnvironment.current() is not None:
        rank_main(args.ranks, args.steps, args.sockets)
        return 0
    command = [sys.executable, *sys.argv]
    return Supervisor(start_script(lambda _: (command, None)), args.ranks, RecoveryOptions(recovery=False), print).run()


if __name__ == "__main__":
    sys.exit(main())
