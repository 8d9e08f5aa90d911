"""Where a fault can strike: the named points of the package, and places in the user's own code."""

import functools
from collections.abc import Callable
from typing import Any, Literal, TypeAlias, cast, get_args

import lightning.pytorch as pl
from torch import nn

from lightning_replica.points import Point, listen

UserPlace: TypeAlias = Literal[
    "forward",  # a layer is done, others are not
    "backward",  # a gradient is there, others are not
    "train_batch_end",  # in `on_train_batch_end`
    "validation",  # in a batch of a validation during the fit
    "epoch_end",  # in `on_train_epoch_end`
    "checkpoint",  # a checkpoint is put together, nothing of it is written
    "scheduler",  # a scheduler is about to step (automatic optimization)
    "logger",  # metrics are about to go to a logger
]
Place: TypeAlias = Point | UserPlace

USER_PLACES: tuple[Place, ...] = get_args(UserPlace)
PLACES: tuple[Place, ...] = (*cast("tuple[Place, ...]", get_args(Point)), *USER_PLACES)


class PlaceCallback(pl.Callback):
    """Calls its `reach` at every place of a fit, on every rank.

    Places whose hooks Lightning tells callbacks of are seen by these; the others by hooks on layers, parameters,
    schedulers and loggers, which are there from the start of a fit to its end.
    """

    def __init__(self) -> None:
        self._undo: list[Callable[[], None]] = []

    def reach(self, trainer: pl.Trainer, place: Place) -> None:
        """This rank has come to ``place``."""

    def on_fit_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Sets the hooks."""

        def reach(place: Place, *_: Any) -> None:
            self.reach(trainer, place)

        def forward(*_: Any) -> None:
            if trainer.training:
                reach("forward")

        self._undo.append(listen(reach))
        layers = [layer for layer in pl_module.modules() if layer is not pl_module and not any(layer.children())]
        self._undo += [layer.register_forward_hook(forward).remove for layer in layers]
        for parameter in filter(_is_trained, pl_module.parameters()):
            handle = parameter.register_post_accumulate_grad_hook(functools.partial(reach, "backward"))
            self._undo.append(handle.remove)
        self._undo.append(_before(pl_module, "lr_scheduler_step", functools.partial(reach, "scheduler")))
        for logger in trainer.loggers:
            self._undo.append(_before(logger, "log_metrics", functools.partial(reach, "logger")))

    def on_train_batch_end(self, trainer: pl.Trainer, *_: Any) -> None:
        """A place."""
        self.reach(trainer, "train_batch_end")

    def on_validation_batch_end(self, trainer: pl.Trainer, *_: Any) -> None:
        """A place, in validations of a fit."""
        if trainer.validating and self._undo:
            self.reach(trainer, "validation")

    def on_train_epoch_end(self, trainer: pl.Trainer, *_: Any) -> None:
        """A place."""
        self.reach(trainer, "epoch_end")

    def on_save_checkpoint(self, trainer: pl.Trainer, *_: Any) -> None:
        """A place."""
        if self._undo:
            self.reach(trainer, "checkpoint")

    def teardown(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        """Takes the hooks away."""
        while self._undo:
            self._undo.pop()()


def _is_trained(parameter: nn.Parameter) -> bool:
    return parameter.requires_grad


def _before(owner: Any, name: str, call: Callable[[], None]) -> Callable[[], None]:
    """Have ``call`` called before a method of one object; return what ends that."""
    hooked = vars(owner).get(name)
    if not isinstance(hooked, _Hooked):
        hooked = _Hooked(owner, name)
    hooked.calls.append(call)

    def undo() -> None:
        hooked.calls.remove(call)
        hooked.leave_if_idle()

    return undo


class _Hooked:
    """Stands in for a method of one object.

    All callbacks share one, so that the object's own method comes back with the last of them, in whatever order they
    leave.

    Args:
        owner: The object.
        name: The method's.

    Attributes:
        calls: What is called before the method.
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

    def leave_if_idle(self) -> None:
        """Give the method back, unless there are calls, or something else has put itself before us."""
        if self.calls or vars(self._owner).get(self._name) is not self:
            return
        if self._own:
            setattr(self._owner, self._name, self._method)
        else:
            delattr(self._owner, self._name)
