"""A training whose way to the first batch is full of collectives, and of what else a script may do before it trains."""

import hashlib
import json
import os
import signal
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import lightning as L
import torch
import torch.distributed as dist
from lightning.pytorch.callbacks import Callback, LearningRateFinder, ModelCheckpoint
from lightning.pytorch.loggers import CSVLogger
from lightning.pytorch.tuner import Tuner
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset
from torchmetrics import MeanMetric, MetricCollection, SumMetric

from lightning_replica import ReplicaZeroStrategy
from tests.support.trainers import callbacks_of, strategy_of
from tests.support.typed import tensor_of


@dataclass
class SetUp:
    """Who dies, and when: in which training loop, before which step.

    ``also`` does one thing differently in a replacement of rank ``differs``.
    """

    rank: int = -1
    loop: int = 1
    step: int = 3
    devices: int = 2
    differs: str = ""


class Data(L.LightningDataModule):
    def prepare_data(self) -> None:
        """Present, so Lightning opens a group to wait for it."""

    def setup(self, stage: str) -> None:
        size = torch.tensor([40 + dist.get_rank()])
        dist.broadcast(size, 0)
        self.data = TensorDataset(torch.randn(int(size), 6, generator=torch.Generator().manual_seed(1)))

    def train_dataloader(self) -> Any:
        return DataLoader(self.data, batch_size=4, shuffle=True)

    def val_dataloader(self) -> Any:
        seeds = [torch.zeros(1) for _ in range(dist.get_world_size())]
        dist.all_gather(seeds, torch.rand(1))
        return DataLoader(self.data, batch_size=4)

    test_dataloader = val_dataloader


class Groups(Callback):
    """Groups and collectives in every hook before training, and one that it makes at its first batch."""

    def __init__(self, case: SetUp) -> None:
        self.case, self.late = case, None
        self.noise: list[float] = []

    def setup(self, trainer: L.Trainer, pl_module: Any, stage: str) -> None:
        self.group = dist.new_group([0, 1])
        self.alone = dist.new_group([trainer.global_rank], use_local_synchronization=True)
        names: list[Any] = [f"made by process {os.getpid()}"]
        dist.broadcast_object_list(names, 0)
        self.name = names[0]

    def on_fit_start(self, trainer: L.Trainer, pl_module: Any) -> None:
        total = torch.rand(3)
        if self.case.differs == "shape" and strategy_of(trainer).session.is_replacement:
            total = torch.rand(4)
        works = [dist.all_reduce(total, group=self.group, async_op=True)]
        if self.case.differs != "left out" or not strategy_of(trainer).session.is_replacement:
            works.append(dist.all_reduce(torch.ones(2), group=self.group, async_op=True))
        for work in works[::-1]:
            work.wait()
        self.noise = total.tolist()
        dist.all_reduce(torch.ones(1), group=self.alone)

    def on_train_start(self, trainer: L.Trainer, pl_module: Any) -> None:
        gathered: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(gathered, {"rank": trainer.global_rank, "noise": self.noise})
        pl_module.scale = 1 + sum(sum(each["noise"]) for each in gathered)

    def on_train_batch_start(self, trainer: L.Trainer, pl_module: Any, *_: Any) -> None:
        if self.late is None:
            self.late = dist.new_group(backend="gloo")
        one = torch.ones(1)
        for group in (self.group, self.late):
            dist.all_reduce(one, group=group)
        pl_module.scale = pl_module.scale + float(one) / 1000

    def on_train_epoch_end(self, trainer: L.Trainer, pl_module: Any) -> None:
        assert dist.get_backend() == dist.get_backend(self.group) == "gloo"
        dist.monitored_barrier(self.group)


class Killer(Callback):
    def __init__(self, case: SetUp, out: Path, loop: int) -> None:
        self.case, self.out, self.loop = case, out, loop

    def on_train_batch_start(self, trainer: L.Trainer, *_: Any) -> None:
        here = trainer.global_rank, self.loop, trainer.global_step
        if (
            here == (self.case.rank, self.case.loop, self.case.step)
            and os.environ["LIGHTNING_REPLICA_GENERATION"] == "0"
        ):
            os.kill(os.getpid(), signal.SIGKILL)


class Net(L.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(6, 8), nn.Dropout(0.1), nn.Linear(8, 1))
        self.scale = 1.0
        self.train_mean, self.val_sum = MeanMetric(), SumMetric()
        self.both = MetricCollection({"mean": MeanMetric(), "sum": SumMetric()})

    def training_step(self, batch: Any, _: int) -> Tensor:
        loss = (self.net(batch[0]).square().mean() - 0.1) * self.scale
        self.train_mean(loss)
        self.log("train", self.train_mean, on_step=False, on_epoch=True)
        return loss

    def validation_step(self, batch: Any, _: int) -> None:
        loss = self.net(batch[0]).square().mean()
        self.val_sum(loss)
        self.both(loss)
        self.log("val", self.val_sum)
        self.log_dict(self.both)

    test_step = validation_step

    def configure_optimizers(self) -> Any:
        return torch.optim.Adam(self.parameters(), lr=0.02)


def trainer(case: SetUp, out: Path, loop: int, groups: Groups) -> L.Trainer:
    """A trainer with Lightning's defaults, as far as they can be on in a forked process."""
    return L.Trainer(
        strategy=ReplicaZeroStrategy(hang_min_s=20.0, hang_max_s=60.0),
        accelerator="cpu",
        devices=case.devices,
        max_epochs=2,
        logger=CSVLogger(out, name=f"loop{loop}", flush_logs_every_n_steps=1),
        callbacks=[groups, Killer(case, out, loop), ModelCheckpoint(monitor="val", save_last=True)],
        log_every_n_steps=1,
        default_root_dir=out,
    )


def once(case: SetUp, out: Path) -> None:
    """The target of `world.run`: one fit."""
    torch.set_num_threads(1)
    L.seed_everything(3, workers=True, verbose=False)
    groups, net = Groups(case), Net()
    own = trainer(case, out, 1, groups)
    own.fit(net, datamodule=Data())
    save(own, net, out, groups.noise)


def twice(case: SetUp, out: Path) -> None:
    """Two fits, of two models with two trainers, with more between them than there need be."""
    torch.set_num_threads(1)
    L.seed_everything(3, workers=True, verbose=False)
    first, net = trainer(case, out, 1, Groups(case)), Net()
    first.fit(net, datamodule=Data())
    tested = first.test(net, datamodule=Data(), verbose=False)
    (total := torch.rand(2)).mul_(dist.get_rank() + 1)
    dist.all_reduce(total)
    teacher = hashlib.sha256(b"".join(p.detach().numpy().tobytes() for p in net.parameters())).hexdigest()
    student = Net()
    with torch.no_grad():
        tensor_of(student.net[0].weight).copy_(tensor_of(net.net[0].weight) * total[0])
    second = trainer(case, out, 2, Groups(case))
    second.fit(student, datamodule=Data())
    first.test(net, datamodule=Data(), verbose=False)
    third = trainer(case, out, 3, Groups(case))
    third.fit(student, datamodule=Data())
    save(third, student, out, [total.tolist(), tested, teacher, first.callback_metrics["val"].item()])


class Opaque:
    """What no rank sends to another."""


class Unsendable(Callback):
    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        trainer.precision_plugin.state_dict = lambda: {"kept": Opaque()}  # type: ignore[method-assign]


def after_what_cannot_be_sent(case: SetUp, out: Path) -> None:
    """Two fits; what the first came to cannot be given to a replacement."""
    torch.set_num_threads(1)
    L.seed_everything(3, workers=True, verbose=False)
    net = Net()
    first = trainer(case, out, 1, Groups(case))
    callbacks_of(first).append(Unsendable())
    first.fit(net, datamodule=Data())
    trainer(case, out, 2, Groups(case)).fit(net, datamodule=Data())


class Tuned(Net):
    """Dies in its training step: a search for a learning rate takes the trainer's callbacks away."""

    def __init__(self, case: SetUp) -> None:
        super().__init__()
        self.case, self.lr = case, 0.02

    def training_step(self, batch: Any, number: int) -> Tensor:
        searches = type(callbacks_of(self.trainer)[0]).__name__ == "_LRCallback"
        here = self.trainer.global_rank, 1 if searches else 2, self.trainer.global_step
        first = os.environ["LIGHTNING_REPLICA_GENERATION"] == "0"
        if first and here == (self.case.rank, self.case.loop, self.case.step):
            os.kill(os.getpid(), signal.SIGKILL)
        return super().training_step(batch, number)

    def configure_optimizers(self) -> Any:
        return torch.optim.Adam(self.parameters(), lr=self.lr)


def tuned(case: SetUp, out: Path) -> None:
    """A search for a learning rate, and a fit with what it has found."""
    torch.set_num_threads(1)
    L.seed_everything(3, workers=True, verbose=False)
    net, groups = Tuned(case), Groups(case)
    own = trainer(SetUp(devices=case.devices), out, 1, groups)
    finder = Tuner(own).lr_find(net, datamodule=Data(), num_training=8)
    assert finder is not None
    own.fit(net, datamodule=Data())
    save(own, net, out, [net.lr, finder.results])


def found_on_the_way(case: SetUp, out: Path) -> None:
    """The same by a callback: two training loops in one fit."""
    torch.set_num_threads(1)
    L.seed_everything(3, workers=True, verbose=False)
    net = Tuned(case)
    own = L.Trainer(
        strategy=ReplicaZeroStrategy(hang_min_s=20.0, hang_max_s=60.0),
        accelerator="cpu",
        devices=case.devices,
        max_epochs=2,
        logger=CSVLogger(out, name="loop1", flush_logs_every_n_steps=1),
        callbacks=[LearningRateFinder(num_training_steps=8)],
        log_every_n_steps=1,
        default_root_dir=out,
    )
    own.fit(net, datamodule=Data())
    save(own, net, out, net.lr)


def save(own: L.Trainer, net: Net, out: Path, more: Any) -> None:
    (out / f"rank{own.global_rank}.json").write_text(
        json.dumps(
            {
                "weights": hashlib.sha256(b"".join(p.detach().numpy().tobytes() for p in net.parameters())).hexdigest(),
                "metrics": {name: value.item() for name, value in own.callback_metrics.items()},
                "random": hashlib.sha256(torch.get_rng_state().numpy().tobytes()).hexdigest(),
                "scale": net.scale,
                "more": more,
            }
        )
    )
