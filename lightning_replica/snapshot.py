"""The host state of a rank: what it is, how it is taken and how it is put back.

[Note: replicated and private]
Loops' counters, schedulers, hyperparameters of param groups, callbacks, module buffers and the values that loggers
last saw are the same on every rank; a replacement takes them from a peer. Random numbers, metrics under way and the
closure's loss belong to one rank; its peers keep a copy (recovery.mirror).
"""

import copy
import io
import json
import struct
from dataclasses import dataclass, field
from typing import Any

import lightning.pytorch as pl
import torch

from lightning_replica import attributes
from lightning_replica._compat.lightning import load_loops
from lightning_replica.callback_state import (
    CallbackStates,
    batch_norm_momenta,
    follow_batch_norm_epoch,
    follow_weight_averaging,
    restore_callbacks,
)
from lightning_replica.data.position import ExactLoader
from lightning_replica.devices import cpu
from lightning_replica.metrics import copy_states, export_results, import_results, put_states
from lightning_replica.module_buffers import BufferCopies
from lightning_replica.recovery.interface import Kind

_LENGTH = struct.Struct("<q")
# What callbacks (stochastic weight averaging) change of the loop itself.
_FIT_LOOP = ("max_epochs", "max_batches", "_skip_backward")


@dataclass
class Snapshot:
    """The host state of one rank at one point.

    Attributes:
        kind: "batch": before the first batch of a window is fetched. "tail": at the entry of the commit.
        step: Updates that are applied once training goes on from here.
        replicated: Plain data and tensors, the same on all ranks.
        rng: State of all generators.
        results: Metrics under way, as `metrics.export_results` gives them.
        loss: The training step's loss, as `metrics.to_plain` gives it; only in a tail.
        fresh: Whether training has yet to begin: the tail before step 0.
        batch: The batch of the step; only in a tail, only on the rank that took the snapshot.
        output: What the closure returned; likewise.
        metric_states: States of torchmetrics objects; likewise. Empty on a replacement.
        attributes: Plain attributes of the module; on a replacement, what may travel of them.
        schedulers: The scheduler configs themselves, which callbacks may replace; None on a replacement.
    """

    kind: Kind
    step: int
    replicated: dict[str, Any]
    rng: bytes
    results: list[dict[str, Any]]
    loss: list[Any] | None = None
    fresh: bool = False
    batch: Any = None
    output: dict[str, Any] = field(default_factory=dict)
    metric_states: list[dict[str, Any]] = field(default_factory=list)
    attributes: dict[str, Any] = field(default_factory=dict)
    schedulers: list[Any] | None = None

    def private_bytes(self) -> bytes:
        """The private part, as it is mirrored."""
        plain = json.dumps({"results": self.results, "loss": self.loss, "fresh": self.fresh}).encode()
        return _LENGTH.pack(len(plain)) + plain + self.rng

    def replicated_bytes(self) -> bytes:
        """The replicated part, loadable with ``weights_only=True``."""
        buffer = io.BytesIO()
        torch.save(self.replicated, buffer)
        return buffer.getvalue()

    @classmethod
    def from_bytes(cls, kind: Kind, step: int, replicated: bytes, private: bytes) -> "Snapshot":
        """A replacement's snapshot, from what a peer sent."""
        start = _LENGTH.size + _LENGTH.unpack_from(private)[0]
        plain = json.loads(private[_LENGTH.size : start])
        state = torch.load(io.BytesIO(replicated), weights_only=True)
        return cls(kind, step, state, private[start:], plain["results"], plain["loss"], plain["fresh"])


class Copies:
    """Copies of what is large and changes seldom, kept from one snapshot to the next.

    Args:
        module: The module.
    """

    def __init__(self, module: pl.LightningModule) -> None:
        self.buffers = BufferCopies(module)
        self.callbacks = CallbackStates()


def _capture(trainer: pl.Trainer, copies: Copies) -> dict[str, Any]:
    """The replicated host state, detached from the trainer."""
    module = trainer.lightning_module
    connector = trainer._logger_connector
    fit_loop = trainer.fit_loop
    return {
        "loops": {k: v for k, v in fit_loop.state_dict().items() if "combined_loader" not in k},
        "val_seen": dict(fit_loop.epoch_loop.val_loop._seen_batches_per_dataloader),
        "val_has_run": fit_loop.epoch_loop.val_loop._has_run,
        "schedulers": [copy.deepcopy(c.scheduler.state_dict()) for c in trainer.lr_scheduler_configs],
        "groups": _groups(trainer),
        "requires_grad": [parameter.requires_grad for parameter in module.parameters()],
        "precision": copy.deepcopy(trainer.precision_plugin.state_dict()),
        "callbacks": copies.callbacks.take(_callbacks(trainer)),
        "logged": [
            dict(connector._logged_metrics),
            dict(connector._callback_metrics),
            dict(connector._progress_bar_metrics),
        ],
        "logger_fx": [connector._first_loop_iter, connector._current_fx],
        "should_stop": trainer.should_stop,
        "accumulate_grad_batches": trainer.accumulate_grad_batches,
        "fit_loop": {name: getattr(fit_loop, name) for name in _FIT_LOOP},
        "buffers": copies.buffers.take(),
        "momenta": batch_norm_momenta(module),
        "training": [m.training for m in module.modules()],
        "positions": [loader.position for loader in exact_loaders(trainer)],
    }


def restore(trainer: pl.Trainer, snapshot: Snapshot) -> None:
    """Puts the trainer back to ``snapshot``; generators come last, for whatever the rest draws."""
    state = snapshot.replicated
    module, connector, fit_loop = trainer.lightning_module, trainer._logger_connector, trainer.fit_loop
    torch.set_grad_enabled(True)
    trainer.training = True
    module._current_fx_name = None
    load_loops(fit_loop, copy.deepcopy(state["loops"]))
    val_loop = fit_loop.epoch_loop.val_loop
    val_loop._seen_batches_per_dataloader.clear()
    val_loop._seen_batches_per_dataloader.update(state["val_seen"])
    val_loop._has_run = state["val_has_run"]
    if state["precision"]:
        trainer.precision_plugin.load_state_dict(copy.deepcopy(state["precision"]))
    if snapshot.schedulers is None:
        follow_weight_averaging(trainer, state["callbacks"])
    else:
        trainer.lr_scheduler_configs[:] = snapshot.schedulers
    for config, saved in zip(trainer.lr_scheduler_configs, state["schedulers"], strict=True):
        config.scheduler.load_state_dict(copy.deepcopy(saved))
    restore_callbacks(_callbacks(trainer), state["callbacks"])
    follow_batch_norm_epoch(trainer, state["momenta"])
    attributes.put(module, snapshot.attributes)
    connector._logged_metrics, connector._callback_metrics, connector._progress_bar_metrics = map(dict, state["logged"])
    connector._first_loop_iter, connector._current_fx = state["logger_fx"]
    trainer.should_stop = state["should_stop"]
    trainer.accumulate_grad_batches = state["accumulate_grad_batches"]
    for name, value in state["fit_loop"].items():
        setattr(fit_loop, name, value)
    with torch.no_grad():
        for name, buffer in module.named_buffers():
            if name in state["buffers"]:
                buffer.copy_(state["buffers"][name])
    for submodule, training in zip(module.modules(), state["training"], strict=True):
        submodule.training = training
    import_results(fit_loop.epoch_loop._results, snapshot.results, trainer.strategy.reduce)
    val_loop._results.reset()  # no snapshot is taken inside a validation
    if snapshot.metric_states:
        put_states(module, snapshot.metric_states)


def restore_groups(trainer: pl.Trainer, snapshot: Snapshot) -> None:
    """Puts back the param groups, with what they hold, and which parameters are trained."""
    parameters = list(trainer.lightning_module.parameters())
    for parameter, required in zip(parameters, snapshot.replicated["requires_grad"], strict=True):
        parameter.requires_grad_(required)
    for optimizer, groups in zip(trainer.optimizers, snapshot.replicated["groups"], strict=True):
        del optimizer.param_groups[len(groups) :]
        for place, saved in enumerate(groups):
            group = {**copy.deepcopy(saved), "params": [parameters[index] for index in saved["params"]]}
            if place < len(optimizer.param_groups):
                optimizer.param_groups[place].update(group)
            else:
                optimizer.param_groups.append(group)


def exact_loaders(trainer: pl.Trainer) -> list[ExactLoader]:
    """The training loaders that can be put back."""
    combined = trainer.fit_loop._combined_loader
    return [loader for loader in combined.flattened if isinstance(loader, ExactLoader)] if combined is not None else []


def take(trainer: pl.Trainer, kind: Kind, step: int, copies: Copies) -> Snapshot:
    """A snapshot of the trainer as it is now."""
    return Snapshot(
        kind,
        step,
        _capture(trainer, copies),
        cpu.rng_state(),
        export_results(trainer.fit_loop.epoch_loop._results),
        metric_states=copy_states(trainer.lightning_module),
        attributes=attributes.take(trainer.lightning_module),
        schedulers=list(trainer.lr_scheduler_configs),
    )


def _groups(trainer: pl.Trainer) -> list[list[dict[str, Any]]]:
    """Param groups, with positions in the module in place of parameters."""
    order = {id(parameter): index for index, parameter in enumerate(trainer.lightning_module.parameters())}
    return [
        [{**group, "params": [order[id(p)] for p in group["params"]]} for group in optimizer.param_groups]
        for optimizer in trainer.optimizers
    ]


def _callbacks(trainer: pl.Trainer) -> list[pl.Callback]:
    found: list[pl.Callback] = trainer.callbacks  # type: ignore[attr-defined]
    return found
