"""Attributes of modules that torch.jit has compiled go back, and to a replacement. They live in C++."""

import sys
from typing import Any

import lightning as L
import pytest
import torch
from torch import Tensor, nn

from tests.state.test_reachable import Copies, done_again, put_sent

pytestmark = [
    pytest.mark.skipif(sys.version_info >= (3, 14), reason="torch.jit.script does not support Python 3.14"),
    pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning"),
]


class Counting(nn.Module):
    calls: int
    seen: list[int]
    sums: dict[str, Tensor]
    steps: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.calls, self.seen, self.mean, self.sums = 0, [0], torch.zeros(2), {"all": torch.zeros(1)}
        self.lin = nn.Linear(2, 2)
        self.register_buffer("steps", torch.zeros(1))

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        self.seen.append(self.calls)
        self.mean = self.mean * 0.9 + 1
        self.sums["all"].add_(self.mean.sum())
        self.steps.add_(1)
        return self.lin(x) * self.calls + self.mean * len(self.seen) + self.sums["all"]


class Module(L.LightningModule):
    """Holds a compiled module that torch knows of, or one that it does not know of."""

    def __init__(self, hidden: bool) -> None:
        super().__init__()
        torch.manual_seed(1)
        compiled: Any = torch.jit.script(Counting())
        self.held: Any = [compiled] if hidden else nn.ModuleList([compiled])

    def advance(self) -> list[float]:
        with torch.no_grad():
            found: list[float] = self.held[0](torch.ones(1, 2)).flatten().tolist()
        if isinstance(self.held, list):
            self.held[0].lin.weight.data.mul_(1.1)
        return found


@pytest.mark.parametrize("hidden", [False, True])
def test_a_batch_that_is_done_again(hidden: bool) -> None:
    module = Module(hidden)
    copies, _ = done_again(module)
    assert module.held[0].calls == 4
    assert module.held[0].seen == [0, 1, 2, 3, 4]
    # Other code restores a buffer that torch knows of.
    assert float(module.held[0].steps) == (4 if hidden else 7)
    assert not copies.inexact.known


@pytest.mark.parametrize("hidden", [False, True])
def test_a_replacement(hidden: bool) -> None:
    module, other = Module(hidden), Module(hidden)
    copies = Copies(module)
    for _ in range(3):
        module.advance()
    replaced = put_sent(other, copies.private())
    assert other.advance() == module.advance()
    assert other.held[0].seen == module.held[0].seen
    assert not replaced.inexact.known


def test_a_traced_module_is_no_finding() -> None:
    module = L.LightningModule()
    module.net = torch.jit.trace(nn.Sequential(nn.Linear(2, 2), nn.ReLU()), torch.ones(1, 2))
    copies = Copies(module)
    copies.put(copies.take())
    assert not copies.inexact.known
