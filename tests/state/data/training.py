"""Trainings with everything that a resumed run could get wrong, and what they leave behind."""

import hashlib
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import lightning as L
import numpy as np
import torch
import torch.distributed as dist
from lightning.pytorch.callbacks import Callback, ModelCheckpoint
from lightning.pytorch.loggers.logger import DummyLogger
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset, IterableDataset, Sampler, TensorDataset, get_worker_info
from torchmetrics import MeanSquaredError

from lightning_replica import ReplicaZeroStrategy
from tests.support.trainers import state_of
from tests.support.typed import tensor_of

INPUTS, BATCH, BATCHES = 6, 2, 6


class Noisy(Dataset[Tensor]):
    """Draws random numbers while loading."""

    def __init__(self, samples: int) -> None:
        self.x = torch.randn(samples, INPUTS, generator=torch.Generator().manual_seed(3))

    def __len__(self) -> int:
        return len(self.x)

    def __getitem__(self, index: int) -> Tensor:
        return self.x[index] + 0.1 * torch.randn(INPUTS)


class Near(Noisy):
    """Refers to the module, whose attributes change with each batch, and counts what it was asked for."""

    def __init__(self, samples: int, net: "Net") -> None:
        super().__init__(samples)
        self.net, self.asked = net, 0

    def __getitem__(self, index: int) -> Tensor:
        self.asked += 1
        return super().__getitem__(index) * (1 + 0.01 * self.net.level) + 0.001 * self.asked


class Stream(IterableDataset[Tensor]):
    """This rank's samples, split among workers, with noise."""

    def __iter__(self) -> Iterator[Tensor]:
        info = get_worker_info()
        rank, world = int(os.environ["LOCAL_RANK"]), int(os.environ["RANKS"])
        x = torch.randn(world * BATCH * BATCHES, INPUTS, generator=torch.Generator().manual_seed(3))[rank::world]
        for row in x[info.id :: info.num_workers] if info else x:
            yield row + 0.1 * torch.randn(INPUTS)


class SizedStream(Stream):
    def __len__(self) -> int:
        return BATCH * BATCHES


class OwnOrder(Sampler[int]):
    """Shuffles in place, each time, with a generator of its own; every rank reads its part."""

    def __init__(self) -> None:
        self.order, self.dice = np.arange(samples()), np.random.default_rng(5)

    def __iter__(self) -> Iterator[int]:
        self.dice.shuffle(self.order)
        return iter(self.order[int(os.environ["LOCAL_RANK"]) :: int(os.environ["RANKS"])].tolist())

    def __len__(self) -> int:
        return BATCH * BATCHES


class OwnLoader(DataLoader[Tensor]):
    """Draws other data each time it is iterated, by a counter of its own, and keeps the iterator."""

    epochs = 0
    batches: Any = None

    def __iter__(self) -> Any:
        self.epochs += 1
        self.batches = super().__iter__()
        return (batch + self.epochs for batch in self.batches)


def fresh() -> DataLoader[Tensor]:
    """Its data are drawn here and now."""
    data = torch.randn(samples(), INPUTS)
    return DataLoader(data, BATCH, shuffle=True)  # type: ignore[arg-type]


def samples() -> int:
    return int(os.environ["RANKS"]) * BATCH * BATCHES


DATA: dict[str, Callable[[], Any]] = {
    "map": lambda: DataLoader(Noisy(samples()), BATCH, shuffle=True),
    "own order": lambda: DataLoader(Noisy(samples()), BATCH, sampler=OwnOrder()),
    "map in order": lambda: DataLoader(Noisy(samples()), BATCH),
    "own loader": lambda: OwnLoader(Noisy(samples()), BATCH, shuffle=True),
    "map workers": lambda: DataLoader(Noisy(samples()), BATCH, shuffle=True, num_workers=2),
    "map persistent": lambda: DataLoader(Noisy(samples()), BATCH, shuffle=True, num_workers=2, persistent_workers=True),
    "stream": lambda: DataLoader(Stream(), BATCH),
    "stream workers": lambda: DataLoader(Stream(), BATCH, num_workers=2),
    "sized stream": lambda: DataLoader(SizedStream(), BATCH),
    "two loaders": lambda: {"a": DataLoader(Noisy(samples()), BATCH), "b": DataLoader(Noisy(samples() // 2), BATCH)},
}


class Net(L.LightningModule):
    """Dropout, BatchNorm, metrics of three kinds, schedulers of three kinds, and hooks after every callback's."""

    average: Tensor

    def __init__(self, data: str, estimates: bool) -> None:
        super().__init__()
        self.data, self.estimates, self.level, self.collated = data, estimates, 0, 0
        self.net = nn.Sequential(nn.Linear(INPUTS, 8), nn.BatchNorm1d(8), nn.Dropout(0.3), nn.Linear(8, 1))
        self.error = MeanSquaredError()
        self.register_buffer("average", torch.zeros(()))

    def training_step(self, batch: Any, batch_idx: int) -> dict[str, Any]:
        x = torch.cat([batch["a"], batch["b"]]) if isinstance(batch, dict) else batch
        loss = (self.net(x).squeeze(1) - x.sum(1)).square().mean()
        self.log("loss", loss, on_step=True, on_epoch=True, sync_dist=True, batch_size=len(x))
        self.error(self.net[0](x).sum(1).detach(), x.sum(1))
        self.log("error", self.error, on_step=False, on_epoch=True)
        self.log("own", loss * (1 + self.global_rank), on_step=False, on_epoch=True, batch_size=len(x))
        return {"loss": loss}

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        first = batch["a"] if isinstance(batch, dict) else batch
        everyones = tensor_of(self.all_gather(outputs["loss"].detach() + first.sum()))
        self.average.mul_(0.5).add_(everyones.mean())
        self.level += 1

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("val", self.net(batch[0]).square().mean() + torch.rand(()), sync_dist=True)

    def on_train_epoch_end(self) -> None:
        self.log("own_sum", tensor_of(self.all_gather(self.trainer.callback_metrics["own"])).sum())

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.AdamW(self.parameters(), lr=1e-2)
        steps = self.trainer.estimated_stepping_batches if self.estimates else 100
        cycle = torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.05, total_steps=int(steps) + 1)
        epoch = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)
        plateau = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, factor=0.5, patience=0)
        return [optimizer], [
            {"scheduler": cycle, "interval": "step"},
            {"scheduler": epoch, "interval": "epoch"},
            {"scheduler": plateau, "monitor": "own_sum", "interval": "epoch"},
        ]

    def collate(self, samples: list[Tensor]) -> Tensor:
        self.collated += 1
        return torch.stack(samples) + 0.01 * self.collated

    def train_dataloader(self) -> Any:
        if self.data.startswith("near"):
            workers = 2 if self.data == "near workers" else 0
            data = Near(samples(), self)
            return DataLoader(data, BATCH, shuffle=True, num_workers=workers, collate_fn=self.collate)
        return fresh() if self.data == "fresh" else DATA[self.data]()

    def val_dataloader(self) -> Any:
        return DataLoader(TensorDataset(torch.ones(4, INPUTS)), batch_size=2)


@dataclass
class Plan:
    """One training."""

    data: str = "map"
    accumulate: int = 1
    steps: int | None = None
    val_check: int | float = 1.0
    estimates: bool = False
    every: int = 2  # optimizer steps between two checkpoints
    reload: int = 0

    def options(self) -> dict[str, Any]:
        limit = {"max_epochs": 2} if self.steps is None else {"max_steps": self.steps}
        return {"accumulate_grad_batches": self.accumulate, "val_check_interval": self.val_check, **limit} | {
            "reload_dataloaders_every_n_epochs": self.reload,
            "use_distributed_sampler": not self.data.startswith("own order"),
        }


@dataclass
class Log(DummyLogger):
    """What happens, in order: batches, validations, ends of epochs, and what loggers are told."""

    events: list[Any] = field(default_factory=list)

    def __post_init__(self) -> None:
        super().__init__()

    def log_metrics(self, metrics: dict[str, float], step: int | None = None) -> None:
        self.events.append(["log", step, dict(metrics)])


class Recorder(Callback):
    """Writes events, and into each checkpoint how many there were; marks the start of a window of batches."""

    def __init__(self, to: Log) -> None:
        self.to, self.window = to, 0

    def on_train_epoch_start(self, trainer: L.Trainer, pl_module: Any) -> None:
        self.to.events.append(["epoch start", trainer.current_epoch])

    def on_train_batch_start(self, trainer: L.Trainer, pl_module: Any, batch: Any, batch_idx: int) -> None:
        if batch_idx % trainer.accumulate_grad_batches == 0:
            self.window = len(self.to.events)
        tensors = list(batch.values()) if isinstance(batch, dict) else [batch]
        self.to.events.append(["batch", trainer.current_epoch, batch_idx, digest(*tensors)])

    def on_validation_end(self, trainer: L.Trainer, pl_module: Any) -> None:
        if not trainer.sanity_checking:
            self.to.events.append(["validated", trainer.global_step])

    def on_train_epoch_end(self, trainer: L.Trainer, pl_module: Any) -> None:
        self.to.events.append(["epoch end", trainer.current_epoch, trainer.global_step])

    def on_train_end(self, trainer: L.Trainer, pl_module: Any) -> None:
        self.to.events.append(["end", trainer.current_epoch, trainer.global_step])

    def on_save_checkpoint(self, trainer: L.Trainer, pl_module: Any, checkpoint: dict[str, Any]) -> None:
        progress = trainer.fit_loop.epoch_loop.batch_progress
        within = progress.current.ready % trainer.accumulate_grad_batches and not progress.is_last_batch
        checkpoint["events"] = self.window if within else len(self.to.events)


def checkpoints(place: Path, every: int) -> list[Callback]:
    """Mid-epoch and on the last batch, after validations, at the ends of epochs; everything is kept."""
    common: dict[str, Any] = {"dirpath": str(place), "save_top_k": -1}
    return [
        ModelCheckpoint(filename="batch-{step}", every_n_train_steps=every, **common),
        ModelCheckpoint(filename="validation-{step}", monitor="val", save_on_train_epoch_end=False, **common),
        ModelCheckpoint(filename="epoch-{step}", save_on_train_epoch_end=True, **common),
    ]


def train(
    plan: Plan,
    save_to: Path | None = None,
    ckpt: Path | None = None,
    devices: int = 2,
    strategy: Any = None,
    callbacks: tuple[Callback, ...] = (),
) -> dict[str, Any]:
    """Trains from the beginning or from a checkpoint; returns events and what came of it, the same kind in both."""
    os.environ["RANKS"] = str(devices)
    L.seed_everything(7, verbose=False)
    net, log = Net(plan.data, plan.estimates), Log()
    saving = checkpoints(save_to, plan.every) if save_to is not None else []
    trainer = L.Trainer(
        strategy=strategy or ReplicaZeroStrategy(bucket_bytes=128),
        accelerator="cpu",
        devices=devices,
        logger=log,
        log_every_n_steps=1,
        callbacks=[*callbacks, Recorder(log), *saving],
        enable_checkpointing=bool(saving),
        enable_progress_bar=False,
        enable_model_summary=False,
        **plan.options(),
    )
    trainer.fit(net, ckpt_path=str(ckpt) if ckpt is not None else None)
    loop = trainer.fit_loop
    state = state_of(trainer.strategy) if isinstance(trainer.strategy, ReplicaZeroStrategy) else None
    return {
        "events": log.events,
        "weights": digest(*net.state_dict().values()),
        "optimizer": digest(*[t for s in state.optimizers for _, t in sorted(s.state()[0].items())]) if state else "",
        "rates": [group["lr"] for group in trainer.optimizers[0].param_groups],
        "schedulers": repr([config.scheduler.state_dict() for config in trainer.lr_scheduler_configs]),
        "metrics": {name: value.item() for name, value in sorted(trainer.callback_metrics.items())},
        "random": digest(torch.get_rng_state()),
        "counters": [trainer.global_step, trainer.current_epoch, loop.epoch_loop.total_batch_idx]
        + [loop.epoch_loop._batches_that_stepped, loop.epoch_progress.total.completed],
    }


def digest(*tensors: Tensor) -> str:
    return hashlib.sha256(b"".join(t.detach().numpy().tobytes() for t in tensors)).hexdigest()[:16]


def leave() -> None:
    """Between trainings of one process under different strategies."""
    if dist.is_initialized():
        dist.destroy_process_group()
