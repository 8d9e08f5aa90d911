"""Parameters that nobody trains, but that follow those that are trained: a teacher, a momentum encoder."""

import copy
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
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


@pytest.mark.parametrize("case", CASES, ids=str)
@pytest.mark.parametrize("fault", FAULTS, ids=str)
def test_it_goes_back(case: Taught, fault: Fault, untouched: Any, tmp_path: Path) -> None:
    struck = Taught((fault,), when=case.when, begins=case.begins)
    world.run(struck, tmp_path, target=train).assert_same(untouched(case))
    assert (tmp_path / "fired0").exists()
