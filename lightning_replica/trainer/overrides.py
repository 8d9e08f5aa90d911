"""What the user's hooks may read or change, judged by which hooks are overridden."""

import functools
import logging
import re
from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass
from types import FunctionType
from typing import Any, Final, Literal

from torch.optim import Optimizer

from lightning_replica._compat.lightning_names import pl
from lightning_replica.core.user_code import UserCode, is_of_framework
from lightning_replica.state.reachable import Survey

log = logging.getLogger(__name__)

# Hooks that run between a backward pass and the update. User code that overrides one wants to see gradients.
_SEE_GRADIENTS: Final = ("on_after_backward", "on_before_optimizer_step")
_SEE_GRADIENTS_IN_MODULE: Final = (*_SEE_GRADIENTS, "configure_gradient_clipping")
# Functions of torch and Lightning that look at gradients.
_OPTIMIZER: Final = re.compile(r"optim|(^|_)opts?(_|$)")
_READERS: Final = ("clip_grad_norm_", "clip_grad_value_", "clip_grads_with_norm_", "get_total_norm", "grad_norm")
# Hooks that run once a batch. User code that overrides one may change weights there.
_CHANGE_WEIGHTS: Final = (
    *("on_train_batch_start", "on_train_batch_end", "on_before_zero_grad", "on_before_backward", "on_after_backward"),
    "on_before_optimizer_step",
)
_CHANGE_WEIGHTS_IN_MODULE: Final = (
    *_CHANGE_WEIGHTS,
    *("optimizer_step", "optimizer_zero_grad", "lr_scheduler_step", "backward", "configure_gradient_clipping"),
)


def who_sees_gradients(trainer: pl.Trainer, module: pl.LightningModule) -> str | None:
    """Return the name of an overridden hook that may read gradients, or None if there is none."""
    return _first(trainer, module, _SEE_GRADIENTS_IN_MODULE, _SEE_GRADIENTS)


@dataclass(frozen=True)
class GradientUse:
    """How user code looks at gradients.

    Attributes:
        whole: Whether it may look at those of all parameters, so that they are gathered.
        kept: Whether it may look at those of a step after its update, until the next step removes them.
    """

    whole: bool
    kept: bool


def gradient_use(trainer: pl.Trainer, survey: Survey, chosen: bool | Literal["auto"]) -> GradientUse:
    """Return how user code looks at gradients; "auto" finds it in the code. Manual optimization needs whole ones."""
    if chosen != "auto":
        return GradientUse(whole=chosen, kept=chosen)
    module = trainer.lightning_module
    reader = _reader_of_gradients(trainer, survey)
    if not module.automatic_optimization:
        return GradientUse(whole=True, kept=reader is not None)
    user = who_sees_gradients(trainer, module) or reader
    if user is not None and trainer.is_global_zero:
        log.info("`%s` may look at gradients, so they are gathered on every rank (whole_gradients='auto').", user)
    return GradientUse(whole=user is not None, kept=reader is not None)


def _reader_of_gradients(trainer: pl.Trainer, survey: Survey) -> str | None:
    """Return the name of a function of the user's that looks at gradients after an update; None if there is none.

    Gradients stay until the next step's backward pass, so any hook in between may look at them. An optimizer has those
    of its shard.
    """
    code = _code_of(trainer, survey, without_methods=_SEE_GRADIENTS_IN_MODULE)
    found = code.reader_of("grad", not_of=("autograd", "func")) or code.caller_of(_READERS)
    return found or code.problem or None


def reader_of_states(trainer: pl.Trainer, survey: Survey) -> str | None:
    """Return the name of a function of the user's that may look at the state of an optimizer; None if none does."""
    return _code_of(trainer, survey).reader_from("state", _OPTIMIZER)


def _code_of(trainer: pl.Trainer, survey: Survey, without_methods: Collection[str] = ()) -> UserCode:
    """Return the code of the user's, without that of optimizers, which have the gradients and states of their shard."""
    callbacks: list[Any] = trainer.callbacks  # type: ignore[attr-defined]
    users = [trainer.lightning_module, *(each for each in callbacks if _is_foreign(type(each).__module__))]
    return UserCode(users, survey.classes, survey.functions(), without=(Optimizer,), without_methods=without_methods)


def may_change_weights(trainer: pl.Trainer, module: pl.LightningModule) -> bool:
    """Return whether user code is likely to change weights between two steps or in a step.

    Lightning's own callbacks change weights only at the end of an epoch. Callbacks of this package never do.
    """
    writes = _first(trainer, module, _CHANGE_WEIGHTS_IN_MODULE, _CHANGE_WEIGHTS)
    return not module.automatic_optimization or writes is not None


def shows_outputs(trainer: pl.Trainer, module: pl.LightningModule) -> bool:
    """Return whether user code may look at what a training step has returned."""
    hooks = ("on_train_batch_end",)
    return _first(trainer, module, hooks, hooks) is not None


def _first(
    trainer: pl.Trainer, module: pl.LightningModule, in_module: Iterable[str], in_callbacks: Iterable[str]
) -> str | None:
    callbacks: list[Any] = trainer.callbacks  # type: ignore[attr-defined]
    owners = [(module, pl.LightningModule, in_module), *((each, pl.Callback, in_callbacks) for each in callbacks)]
    for owner, base, hooks in owners:
        for hook in hooks:
            if _is_users(owner, getattr(owner, hook), getattr(base, hook)):
                return f"{type(owner).__name__}.{hook}"
    return None


def _is_users(owner: Any, hook: Any, default: Any) -> bool:
    """Return whether user code may stand behind a hook.

    The user's is each class of the user's, also one that inherits the hook from a callback of Lightning's: it may
    override what that hook calls. Of an object of Lightning's, what counts is where the function was written:
    ``LambdaCallback`` is Lightning's, and its functions are the user's. Lightning's ``is_overridden`` raises an error
    where the hook is an object that can be called.
    """
    if getattr(hook, "__func__", hook) is default:
        return False
    return _is_foreign(type(owner).__module__) or any(map(_is_foreign, _places(hook)))


def _places(hook: Any) -> Iterator[str]:
    """Yield the modules in which the functions were written that a hook is made of, whatever decorators name them."""
    if isinstance(hook, functools.partial):
        for each in (hook.func, *hook.args, *hook.keywords.values()):
            yield from _places(each) if callable(each) else ()
        return
    function = getattr(hook, "__func__", hook)
    if isinstance(function, FunctionType):
        yield function.__globals__.get("__name__", "")  # `functools.wraps` copies `__module__`
        if hasattr(function, "__wrapped__"):
            yield from _places(function.__wrapped__)
    else:
        yield type(function).__module__


def _is_foreign(module: str) -> bool:
    return not is_of_framework(module)
