"""What may train otherwise than under DDP is said when a fit begins; what does not is not mentioned."""

from collections.abc import Callable
from typing import Any

import lightning as L
import pytest
import torch
from torch import nn

from lightning_replica.trainer.ddp_differences import differences_from_ddp


class Model(L.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.body, self.head = nn.Linear(2, 2), nn.Linear(2, 1)


class Logging(torch.optim.AdamW):
    """Overrides what no update depends on."""

    def zero_grad(self, set_to_none: bool = True) -> None:
        super().zero_grad(set_to_none)

    def describe(self) -> str:
        return f"{len(self.param_groups)} groups"


class Scaled(torch.optim.SGD):
    """Divides by the norm of a parameter."""

    def step(self, closure: Any = None) -> Any:
        for group in self.param_groups:
            for parameter in group["params"]:
                parameter.grad /= parameter.norm()
        return super().step(closure)


class Averaging(torch.optim.SGD):
    """Swaps averages into parameters, as schedule-free optimizers do."""

    def eval(self) -> None:
        for group in self.param_groups:
            for parameter in group["params"]:
                parameter.data.copy_(self.state[parameter]["average"])


def with_hook(parameters: Any) -> torch.optim.Optimizer:
    optimizer = torch.optim.SGD(parameters, lr=0.1)
    optimizer.register_step_post_hook(lambda *_: None)
    return optimizer


def said(make: Callable[[Any], torch.optim.Optimizer], partition: Any = "element", part: str = "") -> list[str]:
    model = Model()
    optimizer = make((getattr(model, part) if part else model).parameters())
    return list(differences_from_ddp(model, [optimizer], partition, None))


@pytest.mark.parametrize("make", [torch.optim.SGD, torch.optim.Adam, Logging])
def test_nothing_is_said_of_what_is_usual(make: Any) -> None:
    assert said(lambda parameters: make(parameters, lr=0.1)) == []
    schedules = torch.optim.lr_scheduler.StepLR

    def scheduled(parameters: Any) -> torch.optim.Optimizer:
        optimizer = make(parameters, lr=0.1)
        schedules(optimizer, 1)
        return optimizer

    assert said(scheduled) == []


def test_parameters_that_no_optimizer_has() -> None:
    (line,) = said(torch.optim.SGD, part="head")
    assert line.startswith("no optimizer of `configure_optimizers` has body.weight, body.bias: gradients of such")


def test_hooks_of_a_step() -> None:
    (line,) = said(with_hook)
    assert "SGD has hooks of `register_step_pre_hook` or `register_step_post_hook`" in line


def test_a_step_of_the_users_own() -> None:
    (line,) = said(Scaled)
    assert "Scaled overrides `step`, which gets pieces of parameters" in line
    assert said(Scaled, "parameter") == []


def test_methods_that_use_the_state() -> None:
    (line,) = said(Averaging)
    assert "`eval` of Averaging may use its state" in line
