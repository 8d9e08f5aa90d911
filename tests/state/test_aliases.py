"""Tensors that share memory with parameters: they follow when these are moved, or it is said that they do not."""

from typing import Any

import pytest
import torch
from lightning.pytorch import LightningModule
from torch import nn

from lightning_replica.core.inexact import Inexact
from lightning_replica.errors import ConfigurationError
from lightning_replica.state.aliases import Aliases
from lightning_replica.state.reachable import Survey
from tests.state.test_reachable import Copies


class Module(LightningModule):
    alias: Any

    def __init__(self) -> None:
        super().__init__()
        self.lin = nn.Linear(4, 3)
        self.optimizer = torch.optim.SGD(self.lin.parameters(), lr=0.1)


def aliases(module: Module) -> tuple[Aliases, Inexact]:
    inexact, trainer = Inexact(), Copies(module).reachable._trainer
    trainer.optimizers = [module.optimizer]
    return Aliases(trainer, Survey.of(trainer), inexact.report), inexact


def move(parameter: torch.Tensor) -> None:
    """Moves a parameter into a larger memory, as a fit does."""
    flat = torch.zeros(100)
    flat[7 : 7 + parameter.numel()] = parameter.detach().reshape(-1)
    parameter.data = torch.as_strided(flat, parameter.shape, parameter.stride(), 7)


@pytest.mark.parametrize(
    "part",
    [
        lambda w: w.data,
        lambda w: w.data[1],
        lambda w: w.detach()[:, 2:],
        lambda w: w.data.t()[1],
        lambda w: w.data[1, 3],
    ],
)
def test_a_part_follows(part: Any) -> None:
    module = Module()
    module.alias = [{"part": part(module.lin.weight)}]
    found, inexact = aliases(module)
    move(module.lin.weight)
    found.follow()
    with torch.no_grad():
        module.lin.weight.mul_(3)
    assert torch.equal(module.alias[0]["part"], part(module.lin.weight))
    module.alias[0]["part"].fill_(5)
    assert torch.equal(part(module.lin.weight), torch.full_like(module.alias[0]["part"], 5))
    assert inexact.known == {}


def test_what_has_memory_of_its_own_stays() -> None:
    module = Module()
    module.alias = module.lin.weight.detach().clone()
    before = module.alias.clone()
    found, inexact = aliases(module)
    move(module.lin.weight)
    found.follow()
    with torch.no_grad():
        module.lin.weight.zero_()
    assert torch.equal(module.alias, before)
    assert inexact.known == {}


def test_what_cannot_follow_is_named() -> None:
    module = Module()
    module.register_buffer("buffer", module.lin.weight.data)
    module.teacher = nn.Parameter(module.lin.bias.data, requires_grad=False)
    module.alias = module.lin.weight.data.view(torch.int32)
    _, inexact = aliases(module)
    assert set(inexact.known) == {"module.buffer", "module.teacher", "module.alias"}


def test_a_parameter_that_is_laid_out_otherwise() -> None:
    module = Module()
    module.alias = module.lin.weight.data[1]
    found, inexact = aliases(module)
    module.lin.weight.data = module.lin.weight.data.t().contiguous().t()
    found.follow()
    assert set(inexact.known) == {"module.alias"}


def test_two_parameters_in_one_memory() -> None:
    module = Module()
    module.tied = nn.Parameter(module.lin.weight.data)
    module.optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    with pytest.raises(ConfigurationError, match=r"The parameters (tied and lin|lin).*share memory"):
        aliases(module)


def test_parameters_that_lie_side_by_side() -> None:
    module = Module()
    whole = torch.zeros(10, 2)
    module.alias = nn.ParameterList([whole[:5], whole[5:]])
    module.columns = nn.ParameterList(torch.zeros(4, 4).split(2, dim=1))
    module.optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    _, inexact = aliases(module)
    assert inexact.known == {}
