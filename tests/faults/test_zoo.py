"""Faults in a training with state of every kind: it ends as the one that was left alone. See tests/chaos/zoo.py."""

import functools
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.faults import zoo_job
from tests.support import world
from tests.support.job import Case, Fault

Untouched = Callable[[int], world.Outcome]
STEPS = 4  # of an epoch
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
RUNS = 5


@pytest.fixture(scope="module")
def untouched(tmp_path_factory: pytest.TempPathFactory) -> Untouched:
    """The untouched run, by epochs."""

    @functools.cache
    def run(epochs: int) -> world.Outcome:
        outcome = world.run(Case(epochs=epochs), tmp_path_factory.mktemp("untouched"), target=zoo_job.run)
        assert outcome.code == 0, outcome.logs
        return outcome

    return run


def fails(faults: tuple[Fault, ...], epochs: int, untouched: Untouched, out: Path) -> None:
    outcome = world.run(Case(faults, epochs=epochs), out, target=zoo_job.run)
    assert [number for number in range(len(faults)) if not (out / f"fired{number}").exists()] == [], outcome.logs
    outcome.assert_same(untouched(epochs))
    recoveries = [line for line in outcome.logs.splitlines() if "recovered at step" in line]
    assert len(recoveries) == len(faults), outcome.logs


def in_epoch(number: int, kind: str, point: str, rank: int) -> Fault:
    """A fault in the middle of an epoch, or at its end: two in epochs that follow are two steps apart or more."""
    return Fault(kind, rank, point, STEPS * number + (STEPS if point == "epoch_end" else 2))


@pytest.mark.parametrize("number", range(RUNS))
def test_a_fault_in_each_epoch(number: int, untouched: Untouched, tmp_path: Path) -> None:
    """Of the faults of one that fails, each is struck alone by -m combinations."""
    faults = tuple(in_epoch(epoch, *case) for epoch, case in enumerate(SAMPLE[number::RUNS]))
    fails(faults, len(SAMPLE[::RUNS]), untouched, tmp_path)


@pytest.mark.combinations
@pytest.mark.parametrize(("kind", "point", "rank"), CASES)
def test_every_fault(kind: str, point: str, rank: int, untouched: Untouched, tmp_path: Path) -> None:
    fails((in_epoch(int(kind == "kill"), kind, point, rank),), 2, untouched, tmp_path)


def test_two_ranks_one_after_the_other(untouched: Untouched, tmp_path: Path) -> None:
    faults = Fault("kill", 1, "forward", 1), Fault("kill", 0, "update", 2), Fault("exception", 3, "train_batch_end", 3)
    outcome = world.run(Case(faults, epochs=2), tmp_path, target=zoo_job.run)
    outcome.assert_same(untouched(2))


@pytest.mark.parametrize("point", ["forward", "train_batch_end"])
def test_a_run_that_is_stopped_and_resumed(point: str, untouched: Untouched, tmp_path: Path) -> None:
    first = Case((Fault("sigterm", 1, point, 2),), epochs=2, gasp=True)
    stopped = world.run(first, tmp_path / "first", target=zoo_job.run)
    assert stopped.code == 75, stopped.logs
    (saved,) = (path for path in (tmp_path / "first" / "gasp").iterdir() if path.name.startswith("step_"))
    resumed = world.run(Case(epochs=2, load=str(saved)), tmp_path / "then", target=zoo_job.run)
    assert resumed.code == 0, resumed.logs
    assert resumed.ranks == untouched(2).ranks, resumed.logs
