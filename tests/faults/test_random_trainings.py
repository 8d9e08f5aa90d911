"""Trainings that seeds make, and faults that they choose: each ends as the one that was left alone."""

import os
import random
from pathlib import Path

import pytest

from tests.faults.random_job import case_of, run
from tests.support import world
from tests.support.job import Fault

SWEEP = range(int(os.environ.get("RANDOM_SEEDS", "1000")))
POINTS = (
    *("forward", "reduction", "before_commit", "after_commit", "update", "gather", "batch_end"),
    *("train_batch_end", "validation", "epoch_end"),
)


def compare(seed: int, out: Path) -> None:
    untouched = world.run(case_of(seed), out / "untouched", target=run)
    assert untouched.code == 0, untouched.logs
    dice = random.Random(f"fault {seed}")
    steps = untouched.ranks[0]["progress"][0]
    point, rank = dice.choice(POINTS), dice.randrange(2)
    step = steps // 2 if point == "epoch_end" else dice.randrange(1, steps)
    kind = dice.choice(["kill", "kill", "exception", "stop"])
    if kind == "stop":
        stops(seed, Fault("sigterm", rank, point, step), untouched, out)
        return
    fault = Fault(kind, rank, point, None if point == "validation" else step)
    outcome = world.run(case_of(seed, faults=(fault,)), out / "faulty", target=run)
    assert (out / "faulty" / "fired0").exists(), fault
    outcome.assert_same(untouched)


def stops(seed: int, fault: Fault, untouched: world.Outcome, out: Path) -> None:
    stopped = world.run(case_of(seed, faults=(fault,), gasp=True), out / "stopped", target=run)
    if stopped.code == 0:  # it came in the last step
        return
    assert stopped.code == 75, stopped.logs
    (saved,) = (path for path in (out / "stopped" / "gasp").iterdir() if path.name.startswith("step_"))
    resumed = world.run(case_of(seed, load=str(saved)), out / "resumed", target=run)
    assert resumed.code == 0, resumed.logs
    assert resumed.ranks == untouched.ranks, (fault, resumed.logs)


@pytest.mark.parametrize("seed", range(6))
def test_a_training(seed: int, tmp_path: Path) -> None:
    compare(seed, tmp_path)


@pytest.mark.combinations
@pytest.mark.parametrize("seed", SWEEP)
def test_many_trainings(seed: int, tmp_path: Path) -> None:
    compare(seed, tmp_path)
