"""Scripts of one fit or two, under Lightning's DDP and under `replica_zero`: what each rank reads and ends with."""

import hashlib
import os
import random
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import lightning as L
import numpy as np
import torch
from lightning.pytorch.utilities.combined_loader import CombinedLoader
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset, DistributedSampler, IterableDataset, get_worker_info

FEATURES, BATCH, BATCHES = 4, 2, 5  # 5 columns: rows of 20 bytes, which no alignment suits


def noise() -> float:
    """From all three generators."""
    return float(torch.rand(())) + random.random() + float(np.random.rand())


def features(index: int) -> Tensor:
    return torch.arange(FEATURES).add(index).cos()


class Noisy(Dataset[Tensor]):
    """The last number of a sample is what was drawn for it."""

    def __len__(self) -> int:
        return 2 * BATCH * BATCHES

    def __getitem__(self, index: int) -> Tensor:
        drawn = noise()
        return torch.cat([features(index) + 0.1 * drawn, torch.tensor([drawn])])


class Stream(IterableDataset[Tensor]):
    """Draws before its first sample, for some samples more than once, and after its last."""

    def __iter__(self) -> Iterator[Tensor]:
        rank, info = int(os.environ["LOCAL_RANK"]), get_worker_info()
        own = random.Random(info.seed if info else 0)
        start = noise()
        for index in range(rank, 2 * BATCH * BATCHES, 2)[info.id :: info.num_workers] if info else range(8):
            while noise() > 1.8:
                pass
            drawn = noise() + start + own.random()
            yield torch.cat([features(index) + 0.1 * drawn, torch.tensor([drawn])])
        noise()


class Net(L.LightningModule):
    def __init__(self, plan: "Plan") -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(FEATURES + 1, 6), nn.Dropout(0.3), nn.Linear(6, 1))
        self.plan = plan
        self.seen: list[Any] = []
        self.noise: list[float] = []

    def draw(self) -> None:
        self.seen.append(noise())

    def setup(self, stage: str) -> None:
        self.draw()

    def on_train_start(self) -> None:
        self.draw()

    def on_train_epoch_start(self) -> None:
        self.draw()

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        if self.plan.peeks and batch_idx == 1:
            assert isinstance(self.trainer.train_dataloader, DataLoader)
            peeks: list[Any] = [self.trainer.train_dataloader, self.trainer.val_dataloaders]
            for peeked in peeks:
                self.seen.append(next(iter(peeked)).tolist())

    def on_train_epoch_end(self) -> None:
        self.draw()

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x = torch.cat(list(batch.values())) if isinstance(batch, dict) else batch
        self.seen.append(hashlib.sha256(x.numpy().tobytes()).hexdigest()[:8])
        self.noise += x[:, -1].tolist()
        return (self.net(x).squeeze(1) - x.sum(1)).square().mean()

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.seen.append(hashlib.sha256(batch.numpy().tobytes()).hexdigest()[:8])
        self.log("val", self.net(batch).square().mean() + torch.rand(()), sync_dist=True)

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), lr=1e-2)


@dataclass(frozen=True)
class Plan:
    """One script.

    Attributes:
        data: "map"; "own sampler": with a `DistributedSampler` of the user's; "random": with each rank's own
            `RandomSampler`; "iterable"; "combined": a `CombinedLoader` of the user's; "two": a dict of two loaders.
        workers: Of the training loader, and of the validation loader.
        persistent: Whether they live longer than an epoch.
        same_loader: Whether the second fit is given the loaders of the first.
        same_trainer: Whether it is the same trainer that goes on, for more epochs.
        seed_workers: As in ``seed_everything(workers=...)``.
        limit: As ``limit_train_batches``.
        generator: Whether loaders have a generator of their own.
        peeks: Whether a hook in the middle of an epoch looks at the loaders for itself.
        fits: How many fits.
    """

    data: str = "map"
    workers: int = 0
    persistent: bool = False
    same_loader: bool = True
    same_trainer: bool = True
    seed_workers: bool = False
    limit: int | None = None
    generator: bool = False
    peeks: bool = False
    fits: int = 2

    def __str__(self) -> str:
        words = [self.data, f"{self.workers} workers", "persistent" * self.persistent, "generator" * self.generator]
        words += ["same loader" if self.same_loader else "new loader", f"{self.fits} fits"]
        words += ["same trainer" if self.same_trainer else "new trainer", "seeded" * self.seed_workers]
        words += ["peeks" * self.peeks]
        return ", ".join(filter(None, [*words, f"limit {self.limit}" if self.limit else ""]))


def loader(plan: Plan, data: str, **more: Any) -> DataLoader[Tensor]:
    options: dict[str, Any] = {"batch_size": BATCH, "num_workers": plan.workers, **more}
    if plan.workers:
        options["persistent_workers"] = plan.persistent
    if plan.generator:
        options["generator"] = torch.Generator().manual_seed(3)
    if data == "iterable":
        return DataLoader(Stream(), **options)
    if data == "own sampler":
        rank = int(os.environ["LOCAL_RANK"])
        return DataLoader(Noisy(), sampler=DistributedSampler(Noisy(), 2, rank, seed=8), **options)
    return DataLoader(Noisy(), shuffle=True, **options)


def loaders(plan: Plan) -> tuple[Any, Any]:
    validation = loader(plan, "iterable" if plan.data == "iterable" else "own sampler")
    if plan.data == "combined":
        return CombinedLoader({"a": loader(plan, "map"), "b": loader(plan, "iterable")}, "min_size"), validation
    if plan.data == "two":
        return {"a": loader(plan, "map"), "b": loader(plan, "map", batch_size=2 * BATCH)}, validation
    return loader(plan, plan.data), validation


def trainer(plan: Plan, strategy: Any) -> L.Trainer:
    return L.Trainer(
        strategy=strategy,
        accelerator="cpu",
        devices=2,
        max_epochs=2,
        limit_train_batches=plan.limit or 1.0,
        use_distributed_sampler=plan.data != "random",
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )


def run(plan: Plan, strategy: Any) -> dict[str, Any]:
    """The script; what it has seen and come to."""
    for name in ("PL_GLOBAL_SEED", "PL_SEED_WORKERS"):
        os.environ.pop(name, None)
    L.seed_everything(5, workers=plan.seed_workers, verbose=False)
    net, data, own = Net(plan), loaders(plan), trainer(plan, strategy())
    for fit in range(plan.fits):
        if fit:
            if not plan.same_loader:
                data = loaders(plan)
            if plan.same_trainer:
                assert own.fit_loop.max_epochs is not None
                own.fit_loop.max_epochs += 2
            else:
                own = trainer(plan, strategy())
        own.fit(net, *data)
        net.seen.append(noise())
    return {"seen": net.seen, "noise": net.noise, "weights": [p.tolist() for p in net.parameters()]}
