"""A training whose data can fail, at a sample of its own choice, inside a DataLoader's worker."""

import hashlib
import json
import os
import random
import signal
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import lightning as L
import numpy as np
import torch
from lightning.pytorch.callbacks import Callback
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset, DistributedSampler, IterableDataset, get_worker_info

from lightning_replica import ReplicaZeroStrategy
from lightning_replica.core.lines import append
from lightning_replica.core.points import listen
from tests.support.job import Case, Injected

INPUTS, BATCH, BATCHES, EPOCHS = 4, 2, 6, 2
_SIGNALS = {"kill": signal.SIGKILL, "segv": signal.SIGSEGV, "bus": signal.SIGBUS, "hang": signal.SIGSTOP}


@dataclass(frozen=True)
class Trap:
    """Fails once where ``rank`` loads the first sample of a batch: "kill", "segv", "bus", "hang" or "exception".

    With ``after``, it first waits until the rank has begun that batch of the same epoch. A batch that is in the
    queue is not handed over yet: the rank still asks the worker for its memory.
    """

    kind: str
    stage: str
    epoch: int
    batch: int
    rank: int = 1
    after: int | None = None

    def __str__(self) -> str:
        return f"{self.kind} {self.stage} {self.epoch} {self.batch}"


@dataclass(kw_only=True)
class Plan(Case):
    """One training; both of its loaders are of the same kind."""

    data: str = "map"
    workers: int = 2
    persistent: bool = False
    generator: bool = False
    traps: tuple[Trap, ...] = ()
    devices: int = 2
    limits: dict[str, Any] = field(default_factory=dict)
    out: Path = Path()

    def __str__(self) -> str:
        return f"{self.data}, {self.workers} workers{', persistent' * self.persistent}"


def noise() -> float:
    """From all three generators."""
    return float(torch.rand(())) + random.random() + float(np.random.rand())


def sample(index: int) -> Tensor:
    return torch.arange(INPUTS).add(index).cos() + 0.1 * noise()


class Springs:
    """What both kinds of data have: the stage, and the traps."""

    def __init__(self, plan: Plan, stage: str) -> None:
        self.plan, self.stage, self.rank = plan, stage, int(os.environ["LOCAL_RANK"])

    def spring(self, position: int) -> None:
        """Before the rank's own sample number ``position`` of this epoch is loaded."""
        for number, trap in enumerate(self.plan.traps):
            marker = self.plan.out / f"trap{number}"
            here = (self.rank, self.stage, epoch(self.plan.out, self.rank, self.stage), position)
            if here == (trap.rank, trap.stage, trap.epoch, self.starts(trap.batch)) and not marker.exists():
                marker.write_text(str(os.getpid()))
                while trap.after is not None and not self.has_begun(trap.epoch, trap.after):
                    time.sleep(0.01)
                if trap.kind == "exception":
                    raise Injected("a sample cannot be read")
                os.kill(os.getpid(), _SIGNALS[trap.kind])

    def has_begun(self, epoch: int, batch: int) -> bool:
        batches = self.plan.out / f"batches{self.rank}"
        return batches.exists() and f"{self.stage}/{epoch} {batch} " in batches.read_text()

    def starts(self, batch: int) -> int:
        return batch * BATCH


class Map(Springs, Dataset[Tensor]):
    def __len__(self) -> int:
        return 2 * BATCH * BATCHES

    def __getitem__(self, index: int) -> Tensor:
        order: DistributedSampler[Any] = DistributedSampler(self, 2, self.rank, seed=8)
        order.set_epoch(epoch(self.plan.out, self.rank, "train"))
        if index in list(order):
            self.spring(list(order).index(index))
        return sample(index)


class Stream(Springs, IterableDataset[Tensor]):
    """Draws before its first sample, for some samples more than once, and after its last."""

    def __iter__(self) -> Iterator[Tensor]:
        info = get_worker_info()
        first, step = (info.id, info.num_workers) if info else (0, 1)
        own = random.Random(info.seed if info else 0)
        start = noise() if info else 0.0
        for position in range(first, BATCH * BATCHES, step):
            while info and noise() > 1.8:
                pass
            self.spring(position)
            yield sample(2 * position + self.rank) + 0.1 * (start + own.random())
        if info:
            noise()

    def starts(self, batch: int) -> int:
        """Of the worker whose turn it is."""
        workers = max(1, self.plan.workers)
        return batch % workers + workers * BATCH * (batch // workers)


def epoch(out: Path, rank: int, stage: str) -> int:
    """Which one is under way; what is loaded before any is the first one's, but for the sanity check."""
    path = out / f"epoch{rank}"
    return int(path.read_text()) if path.exists() else -(stage == "validation")


class Watcher(Callback):
    """Says which epoch it is, and writes down what the rank is given."""

    def __init__(self, plan: Plan) -> None:
        self.plan, self.out = plan, plan.out

    def setup(self, trainer: L.Trainer, pl_module: Any, stage: str) -> None:
        listen(lambda point: self.reach(point, trainer))

    def reach(self, point: str, trainer: L.Trainer) -> None:
        for number, fault in enumerate(self.plan.faults):
            fault.reach(point, trainer.global_step, self.out / f"fired{number}")

    def on_train_epoch_start(self, trainer: L.Trainer, pl_module: Any) -> None:
        temporary = self.out / f"epoch{trainer.global_rank}.new"
        temporary.write_text(str(trainer.current_epoch))
        temporary.rename(self.out / f"epoch{trainer.global_rank}")

    def on_train_batch_start(self, trainer: L.Trainer, pl_module: Any, batch: Tensor, batch_idx: int) -> None:
        self.write("train", trainer, batch, batch_idx)
        self.reach("train_batch_start", trainer)

    def on_validation_batch_start(
        self, trainer: L.Trainer, pl_module: Any, batch: Tensor, batch_idx: int, dataloader_idx: int = 0
    ) -> None:
        if not trainer.sanity_checking:
            self.write("validation", trainer, batch, batch_idx)

    def write(self, stage: str, trainer: L.Trainer, batch: Tensor, batch_idx: int) -> None:
        digest = hashlib.sha256(batch.numpy().tobytes()).hexdigest()[:12]
        append(self.out / f"batches{trainer.global_rank}", f"{stage}/{trainer.current_epoch} {batch_idx} {digest}\n")


class Net(L.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(INPUTS, 6), nn.Dropout(0.3), nn.Linear(6, 1))

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        return (self.net(batch).squeeze(1) - batch.sum(1)).square().mean()

    def validation_step(self, batch: Tensor, batch_idx: int) -> None:
        self.log("val", self.net(batch).square().mean() + torch.rand(()), sync_dist=True)

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.AdamW(self.parameters(), lr=1e-2)
        plateau = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, factor=0.5, patience=0)
        return [optimizer], [{"scheduler": plateau, "monitor": "val", "strict": False}]


def loader(plan: Plan, stage: str) -> DataLoader[Tensor]:
    options: dict[str, Any] = {"batch_size": BATCH, "num_workers": plan.workers}
    if plan.workers:
        options["persistent_workers"] = plan.persistent
    if plan.generator:
        options["generator"] = torch.Generator().manual_seed(3)
    if plan.data == "iterable":
        return DataLoader(Stream(plan, stage), **options)
    data = Map(plan, stage)
    return DataLoader(data, sampler=DistributedSampler(data, 2, int(os.environ["LOCAL_RANK"]), seed=8), **options)


def train(plan: Plan, out: Path) -> None:
    """In a rank."""
    torch.set_num_threads(1)
    plan.out = out
    L.seed_everything(7, workers=True, verbose=False)
    net = Net()
    trainer = L.Trainer(
        strategy=ReplicaZeroStrategy(bucket_bytes=128, hang_min_s=plan.hang[0], hang_max_s=plan.hang[1]),
        accelerator="cpu",
        devices=plan.devices,
        max_epochs=EPOCHS,
        callbacks=[Watcher(plan)],
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        **plan.limits,
    )
    trainer.fit(net, loader(plan, "train"), loader(plan, "validation"))
    result = {
        "weights": [p.tolist() for p in net.parameters()],
        "rate": trainer.optimizers[0].param_groups[0]["lr"],
        "metrics": {name: float(value) for name, value in trainer.callback_metrics.items()},
        "random": noise(),
    }
    (out / f"rank{trainer.global_rank}.json").write_text(json.dumps(result))
