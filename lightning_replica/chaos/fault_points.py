"""Where a fault can strike: the named points of the package, and points in the user's own code."""

import copy
import functools
from collections.abc import Callable
from typing import Any, Literal, TypeAlias, cast, get_args

from torch import nn
from torch.nn.modules.module import register_module_forward_hook

from lightning_replica._compat.lightning_names import pl
from lightning_replica.core.points import Point, listen

UserPoint: TypeAlias = Literal[
    "forward",  # a layer is done, others are not
    "backward",  # a gradient is there, others are not
    "train_batch_end",  # in `on_train_batch_end`
    "validation",  # in a batch of a validation during the fit
    "epoch_end",  # in `on_train_epoch_end`
    "checkpoint",  # a checkpoint is put together, nothing of it is written
    "scheduler",  # a scheduler is about to step (automatic optimization)
    "logger",  # metrics are about to go to a logger
]
FaultPoint: TypeAlias = Point | UserPoint

USER_POINTS: tuple[FaultPoint, ...] = get_args(UserPoint)
FAULT_POINTS: tuple[FaultPoint, ...] = (*cast("tuple[FaultPoint, ...]", get_args(Point)), *USER_POINTS)


class FaultPointCallback(pl.Callback):
    """Calls its `reach` at every point of a fit, on every rank.

    Where Lightning has a callback hook for a point, that hook is used. Other points need hooks on layers, parameters,
    schedulers and loggers, which are installed from the start of a fit to its end.
    """

    def __init__(self) -> None:
        self._undo: list[Callable[[], None]] = []

    def reach(self, trainer: pl.Trainer, point: FaultPoint) -> None:
        """Handle that this rank has come to ``point``."""

    def on_fit_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Install the hooks on layers, parameters, schedulers and loggers."""

        def reach(point: FaultPoint, *_: Any) -> None:
            self.reach(trainer, point)

        layers = {layer for layer in pl_module.modules() if layer is not pl_module and not any(layer.children())}

        def forward(layer: nn.Module, *_: Any) -> None:
            if trainer.training and layer in layers:
                reach("forward")

        self._undo.append(listen(reach))
        # For all modules, and not one for each layer: a checkpoint may pickle layers, as those among hyperparameters.
        self._undo.append(register_module_forward_hook(forward).remove)
        for parameter in filter(_is_trained, pl_module.parameters()):
            handle = parameter.register_post_accumulate_grad_hook(functools.partial(reach, "backward"))
            self._undo.append(handle.remove)
        self._undo.append(_before(pl_module, "lr_scheduler_step", functools.partial(reach, "scheduler")))
        for logger in trainer.loggers:
            self._undo.append(_before(logger, "log_metrics", functools.partial(reach, "logger")))

    def on_train_batch_end(self, trainer: pl.Trainer, *_: Any) -> None:
        """Report the point "train_batch_end"."""
        self.reach(trainer, "train_batch_end")

    def on_validation_batch_end(self, trainer: pl.Trainer, *_: Any) -> None:
        """Report the point "validation", in validations of a fit only."""
        if trainer.validating and self._undo:
            self.reach(trainer, "validation")

    def on_train_epoch_end(self, trainer: pl.Trainer, *_: Any) -> None:
        """Report the point "epoch_end"."""
        self.reach(trainer, "epoch_end")

    def on_save_checkpoint(self, trainer: pl.Trainer, *_: Any) -> None:
        """Report the point "checkpoint", during a fit only."""
        if self._undo:
            self.reach(trainer, "checkpoint")

    def teardown(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        """Remove the hooks."""
        while self._undo:
            self._undo.pop()()


def _is_trained(parameter: nn.Parameter) -> bool:
    return parameter.requires_grad


def _before(owner: Any, name: str, call: Callable[[], None]) -> Callable[[], None]:
    """Hook ``call`` in before a method of one object; return a function that removes it."""
    hooked = vars(owner).get(name)
    if not isinstance(hooked, _Hooked):
        hooked = _Hooked(owner, name)
    hooked.calls.append(call)

    def undo() -> None:
        hooked.calls.remove(call)
        hooked.leave_if_idle()

    return undo


class _Hooked:
    """Replaces a method of one object.

    All callbacks share one instance. So the object's own method comes back when the last callback leaves, in whatever
    order they leave.

    Args:
        owner: The object.
        name: Name of the method.

    Attributes:
        calls: Functions that are called before the method.
    """

    def __init__(self, owner: Any, name: str) -> None:
        self._own = name in vars(owner)
        self._method = getattr(owner, name)
        functools.update_wrapper(self, self._method, updated=())
        self._owner, self._name = owner, name
        self.calls: list[Callable[[], None]] = []
        setattr(owner, name, self)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        for call in tuple(self.calls):
            call()
        return self._method(*args, **kwargs)

    def __reduce__(self) -> Any:
        """Leave copies of the owner, and pickled ones, without the hook; a method of the object's own stays."""
        return (copy.copy, (self._method,)) if self._own else (getattr, (self._owner, self._name))

    def leave_if_idle(self) -> None:
        """Restore the object's own method, unless calls remain or something else has replaced this hook."""
        if self.calls or vars(self._owner).get(self._name) is not self:
            return
        if self._own:
            setattr(self._owner, self._name, self._method)
        else:
            delattr(self._owner, self._name)
