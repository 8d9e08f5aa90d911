"""What code expects of the state of a sharded optimizer that it is not."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from lightning_replica.core.grid import Grid
from lightning_replica.sharding.optimizer import ShardedOptimizer
from lightning_replica.sharding.settings import EngineSettings

Look = Callable[[dict[Any, Any], nn.Parameter], Any]
LOOKS_FOR_ONE: dict[str, Look] = {
    "by key": lambda state, parameter: state[parameter],
    "get": lambda state, parameter: state.get(parameter),
    "in": lambda state, parameter: parameter in state,
}
LOOKS_AT_ALL: dict[str, Look] = {
    "values": lambda state, _: [each["exp_avg"].mul_(0.5) for each in state.values()],
    "items": lambda state, _: [*state.items()],
    "keys": lambda state, _: [*state.keys()],
    "iteration": lambda state, _: [*state],
}


def made() -> tuple[ShardedOptimizer, torch.optim.Optimizer, nn.Parameter]:
    """Return an optimizer that has made one update."""
    parameter = nn.Parameter(torch.ones(8))
    optimizer = torch.optim.Adam([parameter], lr=0.1)
    sharded = ShardedOptimizer(optimizer, [parameter], [Grid.of(2, 2)], 0, EngineSettings(1000))
    for buffers in sharded.buffers:
        buffers.used = [True] * len(buffers.parameters)
    sharded.update(lambda _: None)
    return sharded, optimizer, parameter


def test_updates_are_not_noted() -> None:
    sharded, optimizer, _ = made()
    assert optimizer.state
    assert sharded.unexpected_of_state() == []


@pytest.mark.parametrize("look", LOOKS_FOR_ONE)
def test_who_looks_for_a_parameter_is_told(look: str) -> None:
    sharded, optimizer, parameter = made()
    LOOKS_FOR_ONE[look](optimizer.state, parameter)
    ((why, scope),) = sharded.unexpected_of_state()
    assert why.startswith("code looks for the state of a parameter")
    assert scope == "once"
    assert sharded.unexpected_of_state() == []


@pytest.mark.parametrize("look", LOOKS_AT_ALL)
def test_who_looks_at_all_is_told(look: str) -> None:
    sharded, optimizer, parameter = made()
    LOOKS_AT_ALL[look](optimizer.state, parameter)
    ((why, scope),) = sharded.unexpected_of_state()
    assert "what it writes to it does not go back" in why
    assert scope == "unknown"


def test_another_dict_is_looked_at_too() -> None:
    sharded, optimizer, parameter = made()
    optimizer.load_state_dict({"state": {}, "param_groups": [{"params": [0], "lr": 0.2}]})
    sharded.unexpected_of_state()
    assert parameter not in optimizer.state
    assert len(sharded.unexpected_of_state()) == 1


def test_an_optimizer_is_as_before_in_the_end() -> None:
    sharded, optimizer, _ = made()
    sharded.close()
    assert type(optimizer.state).__name__ == "defaultdict"
    assert len(optimizer.state) == len(sharded.pieces)
