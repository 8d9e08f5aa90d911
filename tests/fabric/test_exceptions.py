"""The loop of docs/fabric.md that votes between forward and backward."""

import re
from pathlib import Path
from typing import Any

import torch
from torch import nn

from lightning_replica import FabricStrategy
from tests.fabric.loop import batch, launch
from tests.support.ranks import open_world, run_ranks

WORLD = 4
DOCS = Path(__file__).parents[2] / "docs" / "fabric.md"


def forward_of_the_docs() -> Any:
    (source,) = re.findall(r"```python\n(def forward.*?)```", DOCS.read_text(), re.S)
    names: dict[str, Any] = {"torch": torch}
    exec(source, names)
    return names["forward"]


def votes(rank: int, store: Any, faults: list[tuple[int, int]], always: bool) -> Any:
    open_world(rank, store, WORLD)
    fabric, forward, pending = launch(rank, WORLD, FabricStrategy(replicas=2)), forward_of_the_docs(), list(faults)
    torch.manual_seed(0)
    net = nn.Sequential(nn.Embedding(16, 5), nn.Dropout(0.3), nn.Linear(5, 1))
    model, optimizer = fabric.setup(net, torch.optim.AdamW(net.parameters(), lr=1e-2))
    torch.manual_seed(rank)
    raised = 0

    def loss_of(model: Any, given: Any, step: int) -> Any:
        nonlocal raised
        loss = model(given).square().mean()
        if (rank, step) in pending:
            if not always:
                pending.remove((rank, step))
            raised += 1
            raise ArithmeticError("injected")
        return loss

    for step in range(6):
        try:
            loss = forward(fabric, lambda m, b, step=step: loss_of(m, b, step), model, batch(rank, step))
        except Exception as error:
            return f"{type(error).__name__}: {error}"
        optimizer.zero_grad()
        fabric.backward(loss)
        optimizer.step()
    return [[p.tolist() for p in net.parameters()], raised]


def test_a_batch_is_done_again() -> None:
    untouched = run_ranks(WORLD, votes, [], False)
    faulty = run_ranks(WORLD, votes, [(1, 2), (0, 3), (3, 3), (2, 5)], False)
    assert [weights for weights, _ in faulty] == [weights for weights, _ in untouched]
    assert [raised for _, raised in faulty] == [1] * WORLD


def test_a_batch_that_always_fails() -> None:
    other = "RuntimeError: another rank has failed"
    assert run_ranks(WORLD, votes, [(1, 2)], True) == [other, "ArithmeticError: injected", other, other]
