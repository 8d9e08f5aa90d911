"""Parameters that nobody trains, but that follow those that are trained: a teacher, a momentum encoder."""

import copy
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch.callbacks import Callback

from tests.support import job, world
from tests.support.job import Case, Fault


class Teaches(Callback):
    """As self-supervised methods do it, by ways of which torch's version counters know nothing."""

    def __init__(self, when: str, begins: int) -> None:
        self._when, self._begins = when, begins

    def setup(self, trainer: Any, pl_module: Any, stage: str) -> None:
        pl_module.teacher = copy.deepcopy(pl_module.first).requires_grad_(False)

    def _follow(self, trainer: Any, module: Any, when: str) -> None:
        if when != self._when or trainer.global_step < self._begins:
            return
        for place, (mine, theirs) in enumerate(
            zip(module.teacher.parameters(), module.first.parameters(), strict=True)
        ):
            if place % 2:
                mine.data = 0.9 * mine.data + 0.1 * theirs.data
            else:
                mine.data.mul_(0.9).add_(theirs.data, alpha=0.1)

    def on_before_zero_grad(self, trainer: Any, pl_module: Any, optimizer: Any) -> None:
        self._follow(trainer, pl_module, "before_zero_grad")

    def on_train_batch_end(self, trainer: Any, pl_module: Any, *args: Any) -> None:
        self._follow(trainer, pl_module, "train_batch_end")


class Differs(Callback):
    """Each rank has codes of its own, layers in other modes and its own limit; a large teacher is the same on all."""

    def __init__(self, elements: int) -> None:
        self._elements = elements

    def setup(self, trainer: Any, pl_module: Any, stage: str) -> None:
        pl_module.codes = torch.nn.Parameter(torch.zeros(self._elements), requires_grad=False)
        pl_module.teacher = torch.nn.Parameter(torch.zeros(2**20 + 1), requires_grad=False)
        pl_module.layers = torch.nn.ModuleList(torch.nn.Dropout() for _ in range(4))

    def on_train_batch_end(self, trainer: Any, pl_module: Any, *args: Any) -> None:
        number = trainer.global_rank + trainer.global_step
        pl_module.codes.data += number
        pl_module.teacher.data += trainer.global_step
        pl_module.layers[number % 4].train(number % 3 == 0)
        trainer.fit_loop.min_epochs = -number

    def on_train_end(self, trainer: Any, pl_module: Any) -> None:
        pl_module.modes = torch.tensor([layer.training for layer in pl_module.layers])
        pl_module.register_buffer("seen", torch.tensor([*pl_module.modes, trainer.fit_loop.min_epochs]))


@dataclass
class Taught(Case):
    devices: int = 2
    when: str = "train_batch_end"
    begins: int = 0


def train(case: Taught, out: Path) -> None:
    job.run(case, out, (Teaches(case.when, case.begins),))


CASES = [Taught(), Taught(when="before_zero_grad"), Taught(begins=5)]
FAULTS = [
    Fault("kill", 0, "forward", 8),
    Fault("kill", 1, "train_batch_end", 8),
    Fault("exception", 1, "train_batch_end", 8),
    Fault("exception", 0, "backward", 8),
]


@pytest.fixture(scope="module")
def untouched(tmp_path_factory: pytest.TempPathFactory) -> Any:
    known: dict[str, world.Outcome] = {}

    def run(case: Taught) -> world.Outcome:
        if str(case) not in known:
            known[str(case)] = world.run(case, tmp_path_factory.mktemp("taught"), target=train)
        return known[str(case)]

    return run


@dataclass
class Apart(Case):
    devices: int = 2
    elements: int = 5


def train_apart(case: Apart, out: Path) -> None:
    job.run(case, out, (Differs(case.elements),))


@pytest.mark.parametrize("fault", FAULTS, ids=str)
def test_what_differs_between_ranks(fault: Fault, tmp_path: Path) -> None:
    untouched = world.run(Apart(), tmp_path / "untouched", target=train_apart)
    weights = [rank["weights"] for rank in untouched.ranks]
    assert weights[0] != weights[1]
    world.run(Apart((fault,)), tmp_path / "struck", target=train_apart).assert_same(untouched)


def test_large_parameters_that_differ_between_ranks_are_named(tmp_path: Path) -> None:
    outcome = world.run(Apart((FAULTS[0],), elements=2**20 + 1), tmp_path, target=train_apart)
    assert outcome.code == 0, outcome.logs
    assert "Not exact: module.codes: ranks hold different values, and this large one was lost" in outcome.logs
    assert "module.teacher" not in outcome.logs


@pytest.mark.parametrize("case", CASES, ids=str)
@pytest.mark.parametrize("fault", FAULTS, ids=str)
def test_it_goes_back(case: Taught, fault: Fault, untouched: Any, tmp_path: Path) -> None:
    struck = Taught((fault,), when=case.when, begins=case.begins)
    world.run(struck, tmp_path, target=train).assert_same(untouched(case))
    assert (tmp_path / "fired0").exists()
