"""A training whose ranks have different numbers of batches; the same in one process, and under torch's Join."""

import json
import os
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import lightning as L
import torch
import torch.distributed as dist
from lightning.pytorch.callbacks import Callback, EMAWeightAveraging, LearningRateMonitor, ModelCheckpoint, Timer
from lightning.pytorch.loggers import CSVLogger
from torch import Tensor, nn
from torch.distributed.algorithms.join import Join
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, IterableDataset, Sampler
from torchmetrics import MeanMetric

from lightning_replica import DyingGaspCheckpoint, JoinCallback
from lightning_replica.chaos.fingerprint import digest
from tests.support.doubles import overriding
from tests.support.job import Case, Faults, OfNodes, watch_closely
from tests.support.typed import grad_of

INPUTS, BATCH = 6, 2
FAULTS: list[Faults] = []  # of this process; not in the module, which callbacks copy


@dataclass
class Uneven(Case):
    """What to train: ``lengths`` says how many batches each rank has."""

    lengths: tuple[int, ...] = (3, 5)
    sized: bool = True
    unsized: int | None = None  # the only rank whose data has no length
    workers: int = 0
    join: bool = True
    average_over_all: bool = True
    accumulate: int = 1
    epochs: int = 1
    clip: float | None = None
    batch_norm: bool = False
    sgd: bool = False
    recovers: bool = True
    epoch_lengths: tuple[tuple[int, ...], ...] = ()  # by epoch, if they are not the same
    manual: bool = False
    fetches: bool = False
    logs_steps: bool = False
    checkpoints: bool = False
    resume: str = ""
    max_steps: int = -1
    extras: bool = False  # callbacks that act on steps, a hook that changes gradients, validations inside of epochs


def samples(rank: int, batches: int) -> list[tuple[Tensor, Tensor]]:
    """The samples of a rank, in order."""
    x = torch.randn(100, INPUTS, generator=torch.Generator().manual_seed(20 + rank))
    return list(zip(x, x.square().sum(1, keepdim=True) / 4, strict=True))[: batches * BATCH]


class Stream(IterableDataset[Any]):
    """Samples without a length."""

    def __init__(self, items: list[tuple[Tensor, Tensor]]) -> None:
        self.items = items

    def __iter__(self) -> Iterator[Any]:
        return iter(self.items)


class OfEpoch(Sampler[int]):
    """Has fewer samples in later epochs; Lightning takes no more than in the first."""

    def __init__(self, batches: list[int]) -> None:
        self.batches, self.epoch = batches, 0

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __len__(self) -> int:
        return self.batches[min(self.epoch, len(self.batches) - 1)] * BATCH

    def __iter__(self) -> Iterator[int]:
        return iter(range(len(self)))


def loader(case: Uneven, rank: int, lengths: tuple[int, ...]) -> Any:
    """The data of a rank."""
    items: Any = samples(rank, lengths[rank])
    if not case.sized or rank == case.unsized:
        return DataLoader(Stream(items), batch_size=BATCH, num_workers=case.workers)
    if case.epoch_lengths:
        most: Any = samples(rank, max(lengths[rank] for lengths in case.epoch_lengths))
        return DataLoader(most, batch_size=BATCH, sampler=OfEpoch([each[rank] for each in case.epoch_lengths]))
    return DataLoader(items, batch_size=BATCH, num_workers=case.workers)


def network(batch_norm: bool) -> nn.Module:
    """The same on all ranks."""
    with torch.random.fork_rng():
        torch.manual_seed(3)
        norm = nn.BatchNorm1d(10) if batch_norm else nn.Identity()
        return nn.Sequential(nn.Linear(INPUTS, 10), norm, nn.Tanh(), nn.Linear(10, 1))


def optimizer_of(module: nn.Module, case: Uneven) -> torch.optim.Optimizer:
    if case.sgd:
        return torch.optim.SGD(module.parameters(), lr=0.05, momentum=0.9)
    return torch.optim.AdamW(module.parameters(), lr=0.05, weight_decay=0.1)


class Model(L.LightningModule):
    def __init__(self, case: Uneven, faults: Faults) -> None:
        super().__init__()
        self.case, FAULTS[:] = case, [faults]
        self.automatic_optimization = not case.manual
        self.net, self.seen = network(case.batch_norm), MeanMetric()
        self.calls: dict[str, int] = {}
        self.validations: list[int] = []

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        self.count("training_step")
        FAULTS[0].reach("forward", self.trainer.global_step)
        loss = nn.functional.mse_loss(self.net(batch[0]), batch[1])
        self.log("loss", loss, on_step=self.case.logs_steps, on_epoch=True, sync_dist=True, batch_size=BATCH)
        self.seen(loss)
        self.log("seen", self.seen, on_step=False, on_epoch=True)
        return loss

    def transfer_batch_to_device(self, batch: Any, device: torch.device, dataloader_idx: int) -> Any:
        x, y = batch  # a shadow is no batch
        return super().transfer_batch_to_device([x, y], device, dataloader_idx)

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        self.count("on_train_batch_start")

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.count("on_train_batch_end")

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("val", nn.functional.mse_loss(self.net(batch[0]), batch[1]), sync_dist=True, batch_size=BATCH)

    def on_validation_start(self) -> None:
        self.validations = [*self.validations, self.trainer.global_step]

    def configure_optimizers(self) -> Any:
        optimizer = optimizer_of(self, self.case)
        return [optimizer], [{"scheduler": torch.optim.lr_scheduler.StepLR(optimizer, 3, 0.5), "interval": "step"}]

    def count(self, hook: str) -> None:
        self.calls = {**self.calls, hook: self.calls.get(hook, 0) + 1}


class Fetches(Model):
    def training_step(self, dataloader_iter: Any) -> Tensor:  # type: ignore[override]
        return super().training_step(*next(dataloader_iter)[:2])


class Doubles(Callback):
    """Changes whole gradients, so that it must be called wherever a shard is updated."""

    def on_before_optimizer_step(self, trainer: L.Trainer, pl_module: Any, optimizer: Any) -> None:
        for parameter in pl_module.parameters():
            parameter.grad.mul_(2)


@overriding()
class Joins(JoinCallback):
    """Counts what a rank does as a shadow."""

    def __init__(self) -> None:
        self.shadows = 0
        self.ends: list[bool] = []

    def on_shadow_step(self, trainer: L.Trainer, pl_module: Any) -> None:
        self.shadows += 1

    def on_join_end(self, trainer: L.Trainer, pl_module: Any, is_last_joiner: bool) -> None:
        self.ends = [*self.ends, is_last_joiner]

    def state_dict(self) -> dict[str, Any]:
        return {"shadows": self.shadows, "ends": self.ends}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.shadows, self.ends = state["shadows"], state["ends"]


def run(case: Uneven, out: Path) -> None:
    """Trains in one rank, and writes down what came of it."""
    torch.set_num_threads(1)
    L.seed_everything(7, verbose=False)
    rank = int(os.environ["LOCAL_RANK"])
    faults, joins = Faults(case, out), Joins()
    for fault in case.faults:
        if fault.kind == "hang":
            watch_closely(fault.rank, 5.0)
    model = (Fetches if case.fetches else Model)(case, faults)
    saving: list[Callback] = (
        [ModelCheckpoint(out / "checkpoints", save_top_k=-1, every_n_train_steps=1)] if case.checkpoints else []
    )
    OfNodes.nodes = case.nodes
    saving += [DyingGaspCheckpoint(out / "gasp")] if case.gasp else []
    extras: list[Callback] = [Timer(), LearningRateMonitor(), EMAWeightAveraging(decay=0.5), Doubles()]
    strategy = OfNodes(
        case.replicas,
        bucket_bytes=256,
        shared_memory=case.shared_memory,
        guard="full",
        uneven_inputs="join" if case.join else None,
        divide_by_initial_world_size=case.average_over_all,
        resume="auto" if case.gasp else None,
        recovery=case.recovers,
    )
    trainer = L.Trainer(
        strategy=strategy,
        default_root_dir=out,
        accelerator="cpu",
        devices=case.devices,
        max_epochs=case.epochs,
        max_steps=case.max_steps,
        accumulate_grad_batches=case.accumulate,
        gradient_clip_val=case.clip,
        use_distributed_sampler=False,
        num_sanity_val_steps=0,
        callbacks=[faults, joins, *saving, *(extras if case.extras else [])],
        val_check_interval=0.5 if case.extras else 1.0,
        enable_checkpointing=case.checkpoints or case.gasp,
        enable_progress_bar=case.extras,
        enable_model_summary=False,
        logger=CSVLogger(out) if case.extras else False,
        log_every_n_steps=1,
    )
    backwards = tuple(reversed(case.lengths))
    trainer.fit(model, loader(case, rank, case.lengths), loader(case, rank, backwards), ckpt_path=case.resume or None)
    strategy.assert_used()
    found = {
        "weights": digest(*model.net.state_dict().values()),
        "metrics": {name: float(value) for name, value in sorted(trainer.callback_metrics.items())},
        "step": [trainer.global_step, trainer.current_epoch, trainer.fit_loop.epoch_loop.total_batch_idx],
        "rate": trainer.optimizers[0].param_groups[0]["lr"],
        "calls": model.calls,
        "validations": model.validations,
        "shadows": [joins.shadows, joins.ends],
        "random": float(torch.rand(())),
    }
    torch.save(model.net.state_dict(), out / f"weights{rank}.pt")
    (out / f"rank{rank}.json").write_text(json.dumps(found))


def in_one_process(case: Uneven, steps: float = float("inf")) -> dict[str, Tensor]:
    """What the weights must be, after some steps: each rank's gradient in turn, added up and divided."""
    module = network(batch_norm=False)
    optimizer = optimizer_of(module, case)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 3, 0.5)
    made = 0
    for epoch in range(case.epochs):
        lengths = case.epoch_lengths[epoch] if case.epoch_lengths else case.lengths
        whole = replace(case, epoch_lengths=())
        batches = [[*loader(whole, rank, lengths)] for rank in range(case.devices)]
        for start in range(0, max(lengths), case.accumulate):
            if made >= steps:
                break
            made += 1
            total = [torch.zeros_like(p) for p in module.parameters()]
            windows = [own[start : start + case.accumulate] for own in batches]
            for window in windows:
                for batch in window:
                    loss = nn.functional.mse_loss(module(batch[0]), batch[1]) / case.accumulate
                    loss.backward()
                if window:
                    total = [each + grad_of(p) for each, p in zip(total, module.parameters(), strict=True)]
                module.zero_grad()
            active = case.devices if case.average_over_all else sum(map(bool, windows))
            for each, p in zip(total, module.parameters(), strict=True):
                p.grad = each / active * (2 if case.extras else 1)
            if case.clip is not None:
                nn.utils.clip_grad_norm_(module.parameters(), case.clip)
            optimizer.step()
            optimizer.zero_grad()
            scheduler.step()
    return dict(module.state_dict())


def under_join(case: Uneven, out: Path) -> None:
    """Trains one epoch under torch's DistributedDataParallel and Join, and writes the weights of the last joiner.

    Ranks without inputs step no optimizer there, so only the last to join has all steps.
    """
    torch.set_num_threads(1)
    rank = int(os.environ["LOCAL_RANK"])
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(case.port))  # type: ignore[attr-defined]
    dist.init_process_group("gloo", rank=rank, world_size=case.devices)
    module = DistributedDataParallel(network(case.batch_norm))
    optimizer = optimizer_of(module, case)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 3, 0.5)
    with Join([module], divide_by_initial_world_size=case.average_over_all):
        for batch in loader(case, rank, case.lengths):
            nn.functional.mse_loss(module(batch[0]), batch[1]).backward()
            optimizer.step()
            optimizer.zero_grad()
            scheduler.step()
    torch.save(module.module.state_dict(), out / f"weights{rank}.pt")
    dist.barrier()
    dist.destroy_process_group()
