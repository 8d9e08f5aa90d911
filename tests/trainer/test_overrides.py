"""Whose code a callback's hook is: what counts is where the function was written, not the class that holds it."""

import functools
from collections.abc import Callable
from functools import partial
from typing import Any

import lightning as L
import pytest
import torch
from lightning.pytorch import utilities
from lightning.pytorch.callbacks import LambdaCallback, ModelCheckpoint
from lightning.pytorch.utilities import grad_norm
from lightning.pytorch.utilities.model_helpers import is_overridden

from lightning_replica.state.reachable import Survey
from lightning_replica.trainer.overrides import gradient_use, may_change_weights, reader_of_states, who_sees_gradients

HOOKS = [name for name in vars(L.Callback) if name.startswith("on_")]


def trainer_with(*callbacks: L.Callback) -> tuple[L.Trainer, L.LightningModule]:
    return L.Trainer(accelerator="cpu", logger=False, callbacks=[*callbacks]), L.LightningModule()


def ask(*_: Any) -> None: ...


def with_hooks(callback: L.Callback, make: Callable[[str], Any]) -> L.Callback:
    for name in HOOKS:
        setattr(callback, name, make(name))
    return callback


def test_a_function_that_the_user_gives_to_lightnings_callback() -> None:
    found = trainer_with(LambdaCallback(on_before_optimizer_step=ask))
    assert who_sees_gradients(*found) == "LambdaCallback.on_before_optimizer_step"
    assert may_change_weights(*found)
    assert may_change_weights(*trainer_with(LambdaCallback(on_train_batch_end=ask)))
    assert not may_change_weights(*trainer_with(LambdaCallback(on_train_epoch_end=ask)))


def test_every_hook_as_an_attribute_of_lightnings_own() -> None:
    """As Lightning's pull request 21407 has it, for signals: hooks that call a function of Lightning's."""
    # Any function that was written there and is no hook of the base class.
    inside: Callable[..., None] = ModelCheckpoint.on_train_batch_end
    callback = with_hooks(L.Callback(), lambda name: partial(inside, name))
    assert len(HOOKS) > 20
    assert is_overridden("on_after_backward", callback, parent=L.Callback)
    found = trainer_with(callback)
    assert who_sees_gradients(*found) is None
    assert not may_change_weights(*found)


class Asks:
    def __call__(self, *_: Any) -> None: ...


@pytest.mark.parametrize("make", [lambda _: ask, lambda _: partial(ask, 1), lambda _: Asks()])
def test_every_hook_as_an_attribute_of_the_users(make: Callable[[str], Any]) -> None:
    found = trainer_with(with_hooks(L.Callback(), make))
    assert who_sees_gradients(*found) == "Callback.on_after_backward"
    assert may_change_weights(*found)


def test_a_hook_of_the_module() -> None:
    trainer, module = trainer_with()
    trainer.strategy._lightning_module = module
    assert who_sees_gradients(trainer, module) is None
    assert not may_change_weights(trainer, module)
    module.on_after_backward = Asks()  # type: ignore[method-assign]
    assert who_sees_gradients(trainer, module) == "LightningModule.on_after_backward"


@pytest.mark.parametrize(
    "hook", ["optimizer_step", "optimizer_zero_grad", "lr_scheduler_step", "backward", "configure_gradient_clipping"]
)
def test_a_hook_that_only_modules_have(hook: str) -> None:
    trainer, module = trainer_with()
    setattr(module, hook, Asks())
    assert may_change_weights(trainer, module)


class Reads(L.Callback):
    def on_train_batch_end(self, trainer: Any, pl_module: Any, *_: Any) -> None:
        self.norms = [norm_of(parameter) for parameter in pl_module.parameters()]


def norm_of(parameter: Any) -> float:
    return float(parameter.grad.norm())


class Penalty(L.Callback):
    def on_train_batch_end(self, trainer: Any, pl_module: Any, *_: Any) -> None:
        x = torch.ones(1, requires_grad=True)
        torch.autograd.grad(x.sum(), x)
        x.grad = None


def read(trainer: Any, pl_module: Any, *_: Any) -> None:
    norm_of(pl_module.weight)


class Given(L.Callback):
    """Calls what it was given, of which its own code knows nothing."""

    def __init__(self, given: Any) -> None:
        self.given = given

    def on_train_batch_end(self, *_: Any) -> None:
        self.given()


class Meter:
    def __call__(self) -> float:
        return norm_of(torch.ones(1))


class Clips(L.Callback):
    def on_train_batch_end(self, trainer: Any, pl_module: Any, *_: Any) -> None:
        torch.nn.utils.clip_grad_norm_(pl_module.parameters(), 1.0)


def logs_that_of_the_strategy(trainer: Any, pl_module: Any, *_: Any) -> None:
    pl_module.grad_norm = trainer.strategy.grad_norm


def calls(trainer: Any, pl_module: Any, *_: Any) -> None:
    grad_norm(pl_module, 2)


def calls_of_its_module(trainer: Any, pl_module: Any, *_: Any) -> None:
    utilities.grad_norm(pl_module, 2)


def binds(trainer: Any, pl_module: Any, *_: Any) -> None:
    partial(utilities.grad_norm, norm_type=2)(pl_module)


def imports(trainer: Any, pl_module: Any, *_: Any) -> None:
    from lightning.pytorch.utilities import grad_norm as norm

    norm(pl_module, 2)


def of_many_parts(part: torch.nn.Module) -> torch.nn.Module:
    return torch.nn.Sequential(part, *(torch.nn.Identity() for _ in range(3000)))


class Scales(torch.nn.Module):
    def forward(self, x: Any) -> Any:
        return x * norm_of(x)


LOOKS = [
    *((Reads(), True), (Penalty(), False), (LambdaCallback(on_train_batch_end=read), True), (Clips(), True)),
    *((Given(Meter()), True), (Given([partial(read, 1)]), True), (Given(len), False)),
    *((LambdaCallback(on_train_batch_end=each), True) for each in (calls, calls_of_its_module, binds, imports)),
    (LambdaCallback(on_train_batch_end=logs_that_of_the_strategy), False),
]


@pytest.mark.parametrize(("callback", "whole"), LOOKS)
def test_code_that_reads_gradients_elsewhere(callback: L.Callback, whole: bool) -> None:
    trainer, module = trainer_with(callback)
    trainer.strategy._lightning_module = module
    assert gradient_use(trainer, Survey.of(trainer), "auto").kept is whole
    assert gradient_use(trainer, Survey.of(trainer), "auto").whole is whole
    assert gradient_use(trainer, Survey.of(trainer), False).whole is False


@pytest.mark.parametrize(("part", "whole"), [(Scales(), True), (torch.nn.Identity(), False)])
def test_code_of_any_part_of_a_large_model(part: torch.nn.Module, whole: bool) -> None:
    trainer, module = trainer_with()
    module.net = of_many_parts(part)
    trainer.strategy._lightning_module = module
    assert gradient_use(trainer, Survey.of(trainer), "auto").whole is whole


def test_only_the_hooks_before_the_update_need_no_copy() -> None:
    class Logs(L.Callback):
        def on_before_optimizer_step(self, trainer: Any, pl_module: Any, optimizer: Any) -> None:
            norm_of(pl_module.weight)

    trainer, module = trainer_with(Logs())
    trainer.strategy._lightning_module = module
    use = gradient_use(trainer, Survey.of(trainer), "auto")
    assert use.whole
    assert not use.kept


def test_a_function_that_takes_its_name_from_lightnings() -> None:
    """To inherit its docstring, for example."""
    named = functools.wraps(L.Callback.on_before_optimizer_step)(lambda *_: None)
    assert named.__module__.startswith("lightning.")
    assert who_sees_gradients(*trainer_with(LambdaCallback(on_before_optimizer_step=named))) is not None
    callback = L.Callback()
    theirs: Callable[..., None] = ModelCheckpoint.on_train_batch_end
    callback.on_train_batch_end = partial(theirs, ask)  # type: ignore[method-assign]
    assert may_change_weights(*trainer_with(callback))


def test_a_class_that_inherits_a_hook_of_lightnings() -> None:
    class Own(ModelCheckpoint):
        """May override what the hook calls."""

    assert may_change_weights(*trainer_with(Own()))
    assert not may_change_weights(*trainer_with(ModelCheckpoint()))


def halves_momentum(trainer: Any, pl_module: Any, *_: Any) -> None:
    for optimizer in pl_module.optimizers(use_pl_optimizer=False):
        for state in optimizer.state.values():
            state["exp_avg"].mul_(0.5)


def looks_at_its_own_state(trainer: Any, pl_module: Any, *_: Any) -> None:
    pl_module.log("stage", float(trainer.state.stage == "fit"))


def reads_rates(trainer: Any, pl_module: Any, *_: Any) -> None:
    pl_module.log("lr", trainer.optimizers[0].param_groups[0]["lr"] * (trainer.state.fn is not None))


def looks_at_the_strategy(trainer: Any, pl_module: Any, *_: Any) -> None:
    optimizer = trainer.optimizers[0]
    optimizer.before = lambda: trainer.strategy.unwrap(trainer).state.step


def forgets(trainer: Any, pl_module: Any, *_: Any) -> None:
    for each in pl_module.optimizers(use_pl_optimizer=False):
        each.state.clear()


def has_options(trainer: Any, pl_module: Any, *_: Any) -> None:
    pl_module.log("done", pl_module.options.state + pl_module.adopted.state)


def drops_one(trainer: Any, pl_module: Any, *_: Any) -> None:
    trainer.optimizers[0].state[pl_module.layer.weight].clear()


@pytest.mark.parametrize(
    ("hook", "found"),
    [
        (drops_one, "drops_one"),
        (forgets, "forgets"),
        (has_options, None),
        (looks_at_the_strategy, None),
        (halves_momentum, "halves_momentum"),
        (looks_at_its_own_state, None),
        (reads_rates, None),
    ],
)
def test_code_that_looks_at_the_state_of_an_optimizer(hook: Any, found: str | None) -> None:
    trainer, module = trainer_with(LambdaCallback(on_train_batch_end=hook))
    trainer.strategy._lightning_module = module
    assert reader_of_states(trainer, Survey.of(trainer)) == found
