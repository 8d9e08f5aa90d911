"""State of callbacks and of the DataModule: their ``state_dict``, and what Lightning's callbacks keep beside it."""

import copy
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from lightning_replica._compat.lightning_names import (
    BackboneFinetuning,
    ModelCheckpoint,
    StochasticWeightAveraging,
    Timer,
    WeightAveraging,
    _LRCallback,
    pl,
)
from lightning_replica._compat.torch import _BatchNorm
from lightning_replica._compat.tree import Tree
from lightning_replica.core.inexact import Report, warn
from lightning_replica.state.objects.contents import copy_of
from lightning_replica.state.own_states import States
from lightning_replica.state.reachable import is_users

# Attributes beside the `state_dict` that decide what the callback does next.
_EXTRAS: dict[type[pl.Callback], tuple[str, ...]] = {
    # `state_dict` contains the score, but `load_state_dict` does not restore it.
    ModelCheckpoint: ("_last_global_step_saved", "_last_checkpoint_saved", "current_score"),
    StochasticWeightAveraging: ("_initialized", "n_averaged", "_latest_update_epoch", "_scheduler_state")
    + ("_accumulate_grad_batches",),
    WeightAveraging: ("_latest_update_step", "_latest_update_epoch"),
    BackboneFinetuning: ("_restarting", "previous_backbone_lr"),
    _LRCallback: ("lrs", "losses", "avg_loss", "best_loss"),
}
# These callbacks hold a second model. It changes only when one of their extras changes.
_WITH_MODEL = (StochasticWeightAveraging, WeightAveraging)


class CallbackStates:
    """Takes the states of a trainer's callbacks; `restore_callbacks` restores them.

    The state of a user's callback is what its ``state_dict`` returns, as in a checkpoint. Its other attributes are left
    alone.

    Args:
        report: Called with a state that is not mirrored.
    """

    def __init__(self, report: Report = warn) -> None:
        self._models: dict[str, tuple[str, dict[str, Tensor]]] = {}
        self._states = States("callback", report)
        self.packed: list[tuple[str, bytes]] = []
        """The states of the last `take` as they are mirrored, by ``state_key``; without those that are not mirrored."""

    def take(self, callbacks: Mapping[str, Any]) -> dict[str, Any]:
        """Return the states of what `stateful` has found, detached from their owners."""
        self.packed = []
        return {key: self._take(key, callback) for key, callback in callbacks.items()}

    def _take(self, key: str, callback: Any) -> dict[str, Any] | None:
        extras = {name: getattr(callback, name) for name in _extras(callback) if hasattr(callback, name)}
        state = {"state": callback.state_dict(), "extras": extras}
        taken: dict[str, Any] | None = self._states.take(key, callback, state, is_users(callback))
        if taken is None:
            return None
        if isinstance(callback, _WITH_MODEL) and callback._average_model is not None:
            known = self._models.get(key)
            if known is None or known[0] != repr(extras):
                tensors = callback._average_model.state_dict()
                known = (repr(extras), {name: copy_of(tensor) for name, tensor in tensors.items()})
                self._models[key] = known
            return {**taken, "model": known[1]}  # too large to be mirrored
        if packed := self._states.packed(key):
            self.packed.append((key, packed))
        return taken


def stateful(trainer: pl.Trainer) -> dict[str, Any]:
    """Return the callbacks by their ``state_key``, and the DataModule if its class defines ``state_dict``."""
    found: dict[str, Any] = {each.state_key: each for each in trainer.callbacks}  # type: ignore[attr-defined]
    data: pl.LightningDataModule | None = trainer.datamodule  # type: ignore[attr-defined]
    if data is not None and type(data).state_dict is not pl.LightningDataModule.state_dict:
        found[f"{type(data).__qualname__} (DataModule)"] = data
    return found


def restore_callbacks(
    callbacks: Mapping[str, Any], saved: Mapping[str, Any], report: Report, same_process: bool = False
) -> None:
    """Restore the states that `CallbackStates.take` returned; report where a callback refuses its own.

    Args:
        callbacks: The callbacks by key.
        saved: Their states.
        report: Called where a callback refuses its state.
        same_process: Whether this process has taken the states. Its clocks go on.
    """
    for key, callback in callbacks.items():
        state = saved.get(key)
        if state is None or (same_process and isinstance(callback, Timer)):  # else that would count time twice
            continue
        if state["state"]:
            try:
                callback.load_state_dict(copy.deepcopy(state["state"]))
            except Exception as error:  # as Lightning's SpikeDetection, which cannot load what it has saved
                report(f"the state of callback {key}", f"it refuses it ({type(error).__name__}: {error})", "once")
        for name in _extras(callback):  # a file may name any other
            if name in state["extras"]:
                setattr(callback, name, copy.deepcopy(state["extras"][name]))
        if "model" in state and isinstance(callback, _WITH_MODEL) and callback._average_model is not None:
            with torch.no_grad():
                for name, tensor in callback._average_model.state_dict().items():
                    tensor.copy_(state["model"][name])


def follow_weight_averaging(trainer: pl.Trainer, saved: Mapping[str, Any]) -> None:
    """On a replacement, install the scheduler that stochastic weight averaging has installed on the other ranks.

    The callback makes this scheduler at the start of the first epoch that it averages. So this function sets the epoch
    counter to that epoch while it calls the callback's hook. The restoration that follows undoes the hook's other
    effects.
    """
    for callback in trainer.callbacks:  # type: ignore[attr-defined]
        if not isinstance(callback, StochasticWeightAveraging) or callback._initialized:
            continue
        if (saved.get(callback.state_key) or {}).get("extras", {}).get("_initialized"):
            progress: Any = trainer.fit_loop.epoch_progress.current
            now, progress.processed = progress.processed, callback.swa_start
            callback.on_train_epoch_start(trainer, trainer.lightning_module)
            progress.processed = now


def follow_batch_norm_epoch(trainer: pl.Trainer, momenta: Sequence[float | None]) -> None:
    """Restore the momenta of BatchNorm layers, which stochastic weight averaging removes for its last epoch.

    Args:
        trainer: The trainer.
        momenta: The momentum of every BatchNorm layer, as `batch_norm_momenta` returned it.
    """
    layers = [layer for layer in trainer.lightning_module.modules() if isinstance(layer, _BatchNorm)]
    for callback in trainer.callbacks:  # type: ignore[attr-defined]
        if isinstance(callback, StochasticWeightAveraging) and not callback.momenta:  # on a replacement
            taken = zip(layers, momenta, strict=True)
            callback.momenta = {layer: layer.momentum for layer, now in taken if now is None is not layer.momentum}
    for layer, momentum in zip(layers, momenta, strict=True):
        layer.momentum = momentum


def batch_norm_momenta(tree: Tree) -> list[float | None]:
    """Return the momentum of every BatchNorm layer in a tree."""
    return [layer.momentum for layer in tree.all_of(_BatchNorm)]


def _extras(callback: pl.Callback) -> tuple[str, ...]:
    return tuple(name for cls, names in _EXTRAS.items() if isinstance(callback, cls) for name in names)
