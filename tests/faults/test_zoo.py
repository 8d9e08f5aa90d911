"""Faults in a training with state of every kind: it ends as the one that was left alone. See tests/chaos/zoo.py."""

from pathlib import Path

import pytest

from tests.faults import zoo_job
from tests.support import world
from tests.support.job import Case, Fault

ZOO = Case(epochs=2)
POINTS = (
    "forward",
    "backward",
    "before_optimizer_step",
    "before_commit",
    "after_commit",
    "update",
    "gather",
    "train_batch_end",
    "epoch_end",
)
CASES = [(kind, point, rank) for kind in ("kill", "exception") for point in POINTS for rank in range(4)]
SAMPLE = [case for number, case in enumerate(CASES) if number % 4 == (number // 4) % 4]


@pytest.fixture(scope="module")
def untouched(tmp_path_factory: pytest.TempPathFactory) -> world.Outcome:
    outcome = world.run(ZOO, tmp_path_factory.mktemp("untouched"), target=zoo_job.run)
    assert outcome.code == 0, outcome.logs
    return outcome


def fails(kind: str, point: str, rank: int, untouched: world.Outcome, out: Path) -> None:
    step = 4 if point == "epoch_end" else 2 if kind == "exception" else 5  # in the first epoch or in the second
    case = Case((Fault(kind, rank, point, step),), epochs=2)
    outcome = world.run(case, out, target=zoo_job.run)
    assert (out / "fired0").exists(), outcome.logs
    outcome.assert_same(untouched)
    assert "recovered at step" in outcome.logs


@pytest.mark.parametrize(("kind", "point", "rank"), SAMPLE)
def test_a_fault(kind: str, point: str, rank: int, untouched: world.Outcome, tmp_path: Path) -> None:
    fails(kind, point, rank, untouched, tmp_path)


@pytest.mark.combinations
@pytest.mark.parametrize(("kind", "point", "rank"), CASES)
def test_every_fault(kind: str, point: str, rank: int, untouched: world.Outcome, tmp_path: Path) -> None:
    fails(kind, point, rank, untouched, tmp_path)


def test_two_ranks_one_after_the_other(untouched: world.Outcome, tmp_path: Path) -> None:
    faults = Fault("kill", 1, "forward", 1), Fault("kill", 0, "update", 2), Fault("exception", 3, "train_batch_end", 3)
    outcome = world.run(Case(faults, epochs=2), tmp_path, target=zoo_job.run)
    outcome.assert_same(untouched)


@pytest.mark.parametrize("point", ["forward", "train_batch_end"])
def test_a_run_that_is_stopped_and_resumed(point: str, untouched: world.Outcome, tmp_path: Path) -> None:
    first = Case((Fault("sigterm", 1, point, 2),), epochs=2, gasp=True)
    stopped = world.run(first, tmp_path / "first", target=zoo_job.run)
    assert stopped.code == 75, stopped.logs
    (saved,) = (path for path in (tmp_path / "first" / "gasp").iterdir() if path.name.startswith("step_"))
    resumed = world.run(Case(epochs=2, load=str(saved)), tmp_path / "then", target=zoo_job.run)
    assert resumed.code == 0, resumed.logs
    assert resumed.ranks == untouched.ranks, resumed.logs
