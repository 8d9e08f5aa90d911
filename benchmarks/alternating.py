"""Contenders that make their steps in turns, in the same processes: the base of `step_time` and `thin_link`.

Every contender is a Trainer in a thread of its own. The contenders pass a baton round: the one that holds it makes one
step while the others sleep. So all of them see the same noise of the machine, and only steps of the same round are
compared. Bytes are those that a network interface counts while a contender holds the baton, with headers.
"""

import os
import threading
import time
import traceback
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import lightning as L
import torch
import torch.distributed as dist
from common import BATCH, LENGTH, QUIET, VOCABULARY, Transformer, loss_of
from lightning.pytorch.strategies import DDPStrategy
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import bf16_compress_hook
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.utils.data import DataLoader, TensorDataset

from lightning_replica import ReplicaZeroStrategy

warnings.filterwarnings("ignore")
WARM_UP = 3


@dataclass(frozen=True)
class Setting:
    """What all contenders have in common.

    Attributes:
        local: Ranks on each node.
        nodes: Number of nodes.
        steps: Steps that are measured.
        sockets: Whether replica_zero uses no shared memory.
        interface: The network interface whose bytes are counted.
        bucket_bytes: Size of the buckets of replica_zero; None for its own choice.
        accelerator: Name of the accelerator, for the Trainer.
    """

    local: int
    nodes: int
    steps: int
    sockets: bool
    interface: str
    bucket_bytes: int | None = None
    accelerator: str = "cpu"

    @property
    def ranks(self) -> int:
        """Number of all ranks."""
        return self.local * self.nodes


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

    def __init__(self, number: int, baton: Baton, interface: str) -> None:
        self.number, self.baton = number, baton
        self.interface = interface
        self.seconds: list[float] = []
        self.bytes: list[float] = []

    def step(self, trainer: L.Trainer) -> None:
        wait_for_device(trainer.strategy.root_device)
        dist.barrier()
        if trainer.global_step > WARM_UP:
            self.seconds.append(time.perf_counter() - self.began)
            self.bytes.append(sent_bytes(self.interface) - self.sent)
        self.baton.pass_on(self.number)
        self.baton.take(self.number)
        dist.barrier()
        self.began, self.sent = time.perf_counter(), sent_bytes(self.interface)


def wait_for_device(device: torch.device) -> None:
    """Wait until an accelerator has done what it was told."""
    if device.type != "cpu":
        torch.accelerator.synchronize(device)


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
        mesh = init_device_mesh(self.root_device.type, (2, world // 2), mesh_dim_names=("replicate", "shard"))
        for block in module.model.blocks:
            fully_shard(block, mesh=mesh, reshard_after_forward=False)
        fully_shard(module.model, mesh=mesh, reshard_after_forward=False)


class DDPWithHook(DDPStrategy):
    """DDP that sends gradients in bf16. Lightning registers a user's hook on CUDA only, and torch checks its name."""

    def _register_ddp_hooks(self) -> None:
        module: Any = self.model
        module.register_comm_hook(None, _in_bf16)


def _in_bf16(state: Any, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
    """Call torch's hook, which `register_comm_hook` takes by its own name only where there is NCCL."""
    return bf16_compress_hook(state, bucket)


def strategy_of(contender: str, setting: Setting) -> Any:
    """Return the strategy of a contender."""
    if contender.startswith("replica_zero"):
        bucket = {} if setting.bucket_bytes is None else {"bucket_bytes": setting.bucket_bytes}
        wire = "bfloat16" if contender.endswith("bf16") else None
        return ReplicaZeroStrategy(
            replicas=min(2, setting.ranks), shared_memory=not setting.sockets, reduce_dtype=wire, **bucket
        )
    if contender == "FSDP2 HSDP":
        return HSDPStrategy()
    if contender == "DDP, bf16 hook":
        return DDPWithHook()
    return DDPStrategy(gradient_as_bucket_view=contender == "DDP, bucket views")


def sent_bytes(interface: str) -> int:
    """Return the bytes sent over a network interface since it was made."""
    for line in Path("/proc/net/dev").read_text().splitlines():
        if line.strip().startswith(f"{interface}:"):
            return int(line.split()[9])
    return 0


def enter(train: Callable[[], None]) -> None:
    """Train one contender in a thread; an exception ends the process, in which the others would wait for their turn."""
    try:
        train()
    except BaseException:
        traceback.print_exc()
        os._exit(1)


def fit(contender: str, turn: Turn, setting: Setting) -> None:
    """Train one contender."""
    turn.baton.take(turn.number)
    torch.manual_seed(0)
    tokens = torch.randint(0, VOCABULARY, (BATCH * setting.ranks * (setting.steps + WARM_UP + 2), LENGTH))
    trainer = L.Trainer(
        strategy=strategy_of(contender, setting),
        accelerator=setting.accelerator,
        devices=setting.local,
        num_nodes=setting.nodes,
        max_steps=setting.steps + WARM_UP + 1,
        **QUIET,
    )
    trainer.fit(Module(contender, turn), DataLoader(TensorDataset(tokens), batch_size=BATCH))
    turn.baton.leave(turn.number)


def alternate(contenders: list[str], setting: Setting) -> dict[str, Turn]:
    """Be a rank in which all contenders train.

    Args:
        contenders: Their names. A replica_zero comes first: it opens the default process group, which Lightning's DDP
            then finds open.
        setting: What they have in common.
    """
    torch.set_num_threads(1)
    baton = Baton(len(contenders))
    turns = {name: Turn(number, baton, setting.interface) for number, name in enumerate(contenders)}
    threads = [
        threading.Thread(target=enter, args=(partial(fit, name, turn, setting),)) for name, turn in turns.items()
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return turns
