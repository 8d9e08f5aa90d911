"""The training of a small model that torch's tensor parallelism divides, with all styles that change gradients."""

import json
import os
import warnings
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import lightning as L
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInputOutput,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)
from torch.utils.data import DataLoader, TensorDataset

from lightning_replica import ConfigurationError, ReplicaZeroStrategy
from lightning_replica._compat.dtensor import is_divided, local_of
from lightning_replica.callbacks import DyingGaspCheckpoint
from tests.support import job
from tests.support.trainers import state_of, strategy_of

LENGTH, SIZE = 4, 8


@dataclass
class Case(job.Case):
    """What to train and what goes wrong."""

    tensor: int = 2
    width: int = 24  # of the hidden layer; an odd one makes parts of different sizes
    plain: bool = False  # no dropout; the values of weights are told
    whole_gradients: bool = False
    clip_by: str = "norm"
    adagrad: bool = False  # which makes its state when it is made
    fits: int = 1  # all but the last make one step


def make(*faults: job.Fault, **options: Any) -> Case:
    return Case(faults, **{"accumulate": 1, "epochs": 1, **options})


class Block(nn.Module):
    """Its norm sees a part of each sequence, so the gradient of the norm is a sum over tensor ranks."""

    def __init__(self, width: int, dropout: float) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(SIZE)
        nn.init.normal_(self.norm.weight)
        self.first = nn.Linear(SIZE, width)
        self.drop = nn.Dropout(dropout)
        self.second = nn.Linear(width, SIZE)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.second(self.drop(torch.tanh(self.first(self.norm(x)))))


AROUND = PrepareModuleInputOutput(
    input_layouts=Replicate(),
    desired_input_layouts=Shard(1),
    output_layouts=Shard(1),
    desired_output_layouts=Replicate(),
)
PLAN = {
    "norm": SequenceParallel(),
    "first": ColwiseParallel(input_layouts=Shard(1), use_local_output=False),
    "second": RowwiseParallel(output_layouts=Shard(1), use_local_output=False),
}


def divide(block: nn.Module, mesh: DeviceMesh) -> None:
    """Divides a block."""
    parallelize_module(block, mesh, PLAN)
    parallelize_module(block, mesh, AROUND)


class Model(L.LightningModule):
    """A divided block, one that follows it and is not trained, and layers that all tensor ranks have."""

    seen: Tensor

    def __init__(self, case: Case, faults: job.Faults) -> None:
        super().__init__()
        self._case, self._faults = case, [faults]  # in a list: not a child
        dropout = 0.0 if case.plain else 0.2
        self.drop = nn.Dropout(dropout)
        self.block, self.frozen = Block(case.width, dropout), Block(case.width, 0.0)
        self.last = nn.Linear(SIZE, 1)
        self.register_buffer("seen", torch.zeros((), dtype=torch.int64))
        self.norms: list[float] = []
        self.values: list[Any] = []

    def configure_model(self) -> None:
        if self._case.tensor > 1 and not is_divided(self.block.first.weight):
            assert self.device_mesh is not None
            for block in (self.block, self.frozen):
                divide(block, self.device_mesh["tensor_parallel"])
        self.frozen.requires_grad_(False)  # not earlier: `SequenceParallel` makes parameters that are trained

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.block(self.drop(x))
        if hidden.requires_grad:
            step = self.trainer.global_step
            hidden.register_hook(lambda _: self._faults[0].reach("backward", step))
        return self.last(self.frozen(hidden))

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = nn.functional.mse_loss(self(batch[0]), batch[1])
        self._faults[0].reach("forward", self.trainer.global_step)
        self.seen += 1
        self.log("loss", loss, on_step=True, on_epoch=True, sync_dist=True)
        return loss

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("val", nn.functional.mse_loss(self(batch[0]), batch[1]), sync_dist=True)

    def on_train_batch_end(self, *args: Any) -> None:
        with torch.no_grad():
            for ours, theirs in zip(self.frozen.parameters(), self.block.parameters(), strict=True):
                ours.mul_(0.9).add_(theirs, alpha=0.1)
        norm = strategy_of(self.trainer).grad_norm
        if norm is not None:
            self.norms.append(norm)

    def on_train_end(self) -> None:
        if self._case.plain:
            wholes = [p.full_tensor() if is_divided(p) else p for p in self.parameters()]
            self.values = [whole.detach().flatten().tolist() for whole in wholes]

    def configure_optimizers(self) -> Any:
        matrices = [p for p in self.parameters() if p.ndim > 1]
        vectors = [p for p in self.parameters() if p.ndim <= 1]
        groups = [{"params": matrices, "weight_decay": 0.1}, {"params": vectors, "weight_decay": 0.0}]
        optimizer: torch.optim.Optimizer = torch.optim.AdamW(groups, lr=1e-2, eps=1e-3)
        if self._case.adagrad:
            optimizer = torch.optim.Adagrad(groups, lr=1e-2, initial_accumulator_value=0.1)
        return [optimizer], [torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.9)]


def run(case: Case, out: Path, **options: Any) -> None:
    """Trains in one rank and writes down what came of it; ``options`` are the strategy's."""
    warnings.simplefilter("ignore")  # torch warns of random operations on CPUs: tensor ranks draw the same numbers
    torch.set_num_threads(1)
    L.seed_everything(7, verbose=False)
    x = torch.randn(32, LENGTH, SIZE)
    data = TensorDataset(x, x.square().sum(2, keepdim=True))
    faults = job.Faults(case, out)
    with torch.random.fork_rng():
        torch.manual_seed(int(os.environ["LOCAL_RANK"]))  # all get the weights of rank 0
        model = Model(case, faults)
    loaders = DataLoader(data, 4, shuffle=True), DataLoader(data, 4)
    for _ in range(case.fits - 1):
        _trainer(case, out, faults, max_steps=1, **options).fit(model, *loaders)
    trainer = _trainer(case, out, faults, **options)
    trainer.fit(model, *loaders, ckpt_path=case.load or None)
    (out / f"rank{trainer.global_rank}.json").write_text(json.dumps(_result(trainer, model)))


def _trainer(case: Case, out: Path, faults: job.Faults, max_steps: int = -1, **options: Any) -> L.Trainer:
    return L.Trainer(
        strategy=ReplicaZeroStrategy(
            **job.strategy_options(case),
            tensor_parallel_size=case.tensor,
            whole_gradients=case.whole_gradients,
            **options,
        ),
        accelerator="cpu",
        devices=case.devices,
        max_epochs=case.epochs,
        max_steps=max_steps,
        accumulate_grad_batches=case.accumulate,
        val_check_interval=2,
        limit_val_batches=0 if case.plain else 1,
        gradient_clip_val=case.clip,
        gradient_clip_algorithm=case.clip_by,
        callbacks=[
            faults,
            ModelCheckpoint(out / "checkpoints", filename="{step}", every_n_train_steps=2, save_top_k=-1),
            *([DyingGaspCheckpoint(out / "gasp", case.grace_s)] if case.gasp else ()),
        ],
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )


def trained(model: Model) -> str:
    return job._digest(*map(local_of, model.block.parameters()), *model.last.parameters())


def validate(case: Case, out: Path) -> None:
    """Only reads a checkpoint, and cannot write one."""
    warnings.simplefilter("ignore")
    model = Model(case, job.Faults(case, out))
    trainer = _trainer(case, out, model._faults[0])
    data = torch.zeros(4, LENGTH, SIZE), torch.zeros(4, LENGTH, 1)
    trainer.validate(model, DataLoader(TensorDataset(*data)), ckpt_path=case.load, verbose=False)
    try:
        trainer.save_checkpoint(out / "saved.ckpt")
        error = ""
    except ConfigurationError as refused:
        error = str(refused)
    result = {"trained": trained(model), "error": error}
    (out / f"rank{trainer.global_rank}.json").write_text(json.dumps(result))


def _result(trainer: L.Trainer, model: Model) -> dict[str, Any]:
    state = state_of(strategy_of(trainer))
    return {
        "values": model.values,
        "norms": model.norms,
        "weights": job._digest(*map(local_of, model.parameters()), *model.buffers()),
        "trained": trained(model),
        "shared": job._digest(*model.last.parameters(), *map(local_of, model.block.norm.parameters())),
        "main": job._digest(*[buffers.main for buffers in state.buffers]),
        "optimizer": job._digest(*[t for sharded in state.optimizers for _, t in sorted(sharded.state()[0].items())]),
        "metrics": {name: value.item() for name, value in trainer.callback_metrics.items()},
        "random": job._digest(torch.get_rng_state()),
        "progress": [trainer.global_step, trainer.current_epoch, trainer.fit_loop.epoch_loop.total_batch_idx],
    }
