"""What the user's hooks may read or change, judged by which hooks are overridden."""

import logging
from collections.abc import Iterable
from typing import Any, Literal

import lightning.pytorch as pl
from lightning.pytorch.utilities.model_helpers import is_overridden

log = logging.getLogger(__name__)

# Hooks that run between a backward pass and the update. User code that overrides one wants to see gradients.
_SEE_GRADIENTS = ("on_after_backward", "on_before_optimizer_step")
_SEE_GRADIENTS_IN_MODULE = (*_SEE_GRADIENTS, "configure_gradient_clipping")
_KNOWN = ("lightning", "lightning_replica")  # packages whose callbacks change no weights in a batch
# Hooks that run once a batch outside of the step. User code that overrides one may change weights there.
_CHANGE_WEIGHTS = ("on_train_batch_start", "on_train_batch_end", "on_before_zero_grad", "on_before_backward")


def who_sees_gradients(trainer: pl.Trainer, module: pl.LightningModule) -> str | None:
    """Return the name of an overridden hook that may read gradients, or None if there is none."""
    return _first(trainer, module, _SEE_GRADIENTS_IN_MODULE, _SEE_GRADIENTS, foreign_only=False)


def whole_gradients_for(trainer: pl.Trainer, chosen: bool | Literal["auto"]) -> bool:
    """Return whether gradients are whole. "auto" means: where manual optimization or a hook shows them to users."""
    module = trainer.lightning_module
    if chosen != "auto":
        return chosen
    if not module.automatic_optimization:
        return True
    hook = who_sees_gradients(trainer, module)
    if hook is not None and trainer.is_global_zero:
        log.info("`%s` may look at gradients, so they are gathered on every rank (whole_gradients='auto').", hook)
    return hook is not None


def may_change_weights(trainer: pl.Trainer, module: pl.LightningModule) -> bool:
    """Return whether user code may change weights between two steps.

    Lightning's own callbacks change weights only at the end of an epoch. Callbacks of this package never do.
    """
    in_module = (*_CHANGE_WEIGHTS, "optimizer_step", "optimizer_zero_grad")
    return not module.automatic_optimization or (
        _first(trainer, module, in_module, _CHANGE_WEIGHTS, foreign_only=True) is not None
    )


def _first(
    trainer: pl.Trainer,
    module: pl.LightningModule,
    in_module: Iterable[str],
    in_callbacks: Iterable[str],
    foreign_only: bool,
) -> str | None:
    for hook in in_module:
        if is_overridden(hook, module):
            return f"{type(module).__name__}.{hook}"
    callbacks: list[Any] = trainer.callbacks  # type: ignore[attr-defined]
    for callback in callbacks:
        if foreign_only and type(callback).__module__.split(".")[0] in _KNOWN:
            continue
        for hook in in_callbacks:
            if is_overridden(hook, callback, parent=pl.Callback):
                return f"{type(callback).__name__}.{hook}"
    return None
