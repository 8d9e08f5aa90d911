"""docs/migration.md: every line of code on it runs, and what it says is the same is the same."""

import ast
import re
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import fp16_compress_hook
from torch.nn.parallel import DistributedDataParallel
from torch.optim import SGD

from tests.support.ranks import open_world, run_ranks

PAGE = Path(__file__).parents[2] / "docs" / "migration.md"
ELSEWHERE = ("fairscale", "FSDP1")  # what is not installed, or not for CPUs
OF_LIGHTNING = ("Trainer", "ReplicaZeroStrategy", "DyingGaspCheckpoint", "RecoveryCallback")
STEPS = 4


def imported() -> dict[str, Any]:
    """The names that the page says it uses."""
    (code,) = re.findall(r"```python\n# names\n(.*?)```", PAGE.read_text(), re.DOTALL)
    found: dict[str, Any] = {"torch": torch}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch compiles its functional optimizers in a way that is going
        exec(code, found)
    return found


def rows() -> list[tuple[list[str], list[str]]]:
    """The code on both sides of every row; that of MindIO's is not Python."""
    lines = [line for line in PAGE.read_text().splitlines() if line.startswith("| ") and "`" in line]
    return [tuple(re.findall(r"`([^`]+)`", cell) for cell in line.split(" | ")[:2]) for line in lines]  # type: ignore[misc]


def blocks() -> list[tuple[str, str]]:
    """The pairs of code blocks: before, after."""
    found = re.findall(r"```python\n# (before|after)(: \w+)?\n(.*?)```", PAGE.read_text(), re.DOTALL)
    assert [each[0] for each in found] == ["before", "after"] * (len(found) // 2)
    return [("" if b[1] else b[2], a[2]) for b, a in zip(found[::2], found[1::2], strict=True)]


def is_of_lightning(code: str) -> bool:
    """Whether it is about the Trainer, which does not run in ranks that a test has started."""
    root = next(node.id for node in ast.walk(ast.parse(code)) if isinstance(node, ast.Name))
    return root in OF_LIGHTNING


HERE = sorted({code for _, after in rows() for code in after if is_of_lightning(code)})
RIGHT = [code for _, after in rows() for code in after if code not in HERE]
LEFT = [code for before, after in rows() for code in before if not code.startswith(ELSEWHERE) and after[0] not in HERE]


def loss_of(module: nn.Module, batch: Tensor) -> Tensor:
    loss: Tensor = module(batch).square().mean()
    return loss


def names(rank: int, kind: str | None = None) -> dict[str, Any]:
    """What the page's code may use; all of it new, after a step of the optimizer."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(5, 3), nn.Tanh(), nn.Linear(3, 4))
    ddp, params = DistributedDataParallel(model), list(model.parameters())
    generator = torch.Generator().manual_seed(rank)
    data = [torch.randn(4, 5, generator=generator) for _ in range(STEPS)]
    found = {**imported(), "loss_of": loss_of, "model": model, "ddp": ddp, "params": params, "data": data, "rank": rank}
    if kind is not None:
        optimizer = found[kind](params, SGD, lr=0.1, momentum=0.9)
        loss_of(ddp, data[0]).backward()
        optimizer.step()
        optimizer.consolidate_state_dict(to=0)
        state = [optimizer.state_dict() if rank == 0 else None]
        dist.broadcast_object_list(state, 0)
        more = nn.Parameter(torch.zeros(7))
        found |= {"optimizer": optimizer, "state": state[0], "group": dist.group.WORLD, "more": more}
        found["closure"] = lambda: loss_of(ddp, data[0])
    return found


def try_lines(rank: int, store: Any, codes: list[str], of_torch: bool) -> list[str]:
    """Runs every line by itself and returns what was raised."""
    open_world(rank, store, 2)
    wrong = []
    for code in codes:
        found = names(rank, "ZeroRedundancyOptimizer" if of_torch else "ReplicaOptimizer")
        if code.startswith("ddp.register_comm_hook"):  # torch knows its own hooks by name, where there is NCCL
            found["fp16_compress_hook"] = lambda state, bucket: fp16_compress_hook(state, bucket)
        try:
            value = eval(code, found)
            if isinstance(value, torch.optim.Optimizer) and not getattr(value, "_overlap_with_ddp", False):
                value.step()
        except Exception as error:
            wrong.append(f"{code}: {type(error).__name__}: {error}")
    return wrong


@pytest.mark.parametrize(("codes", "of_torch"), [(LEFT, True), (RIGHT, False)], ids=["torch's", "ours"])
def test_every_line_of_the_tables_runs(codes: list[str], of_torch: bool) -> None:
    assert len(codes) > 10
    assert run_ranks(2, try_lines, codes, of_torch) == [[], []]


def test_a_line_that_does_not_run_is_found() -> None:
    for wrong in run_ranks(2, try_lines, ["ReplicaOptimizer(params, SGD, copies=2)"], False):
        assert "TypeError" in wrong[0]


@pytest.mark.parametrize("code", HERE)
def test_every_line_about_the_trainer_runs(code: str) -> None:
    eval(code, imported())


def try_blocks(rank: int, store: Any, number: int) -> list[Any]:
    """The weights after a block, and after as many steps as there are batches if the block makes none."""
    open_world(rank, store, 2)
    weights = []
    for code in filter(None, blocks()[number]):
        found = names(rank)
        exec(compile(code, str(PAGE), "exec"), found)
        for batch in found["data"] if "backward" not in code else []:
            found["optimizer"].zero_grad()
            loss_of(found["ddp"], batch).backward()
            found["optimizer"].step()
        whole = [p.full_tensor() if hasattr(p, "full_tensor") else p for p in found["model"].parameters()]
        weights.append([each.detach().flatten().tolist() for each in whole])
    return weights


@pytest.mark.parametrize(("number", "is_same"), [(0, torch.equal), (1, None), (2, None), (3, torch.allclose)])
def test_every_block_runs(number: int, is_same: Callable[..., bool] | None) -> None:
    """torch's optimizer comes to the same bits, FSDP adds up in another order; the others run after only."""
    first, second = run_ranks(2, try_blocks, number)
    assert isinstance(first, list), first
    assert first == second
    assert len(first) == (1 if is_same is None else 2)
    if is_same is not None:
        before, after = ([torch.tensor(each) for each in weights] for weights in first)
        assert all(map(is_same, before, after))
