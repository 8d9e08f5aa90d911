"""Every kind of fault, at every point, on every rank: the run ends with the bits of the untouched run."""

from pathlib import Path

import pytest

from tests.support import job, world
from tests.support.job import Case, Fault

# Points that are reached only after some number of updates; all others are aimed at the middle of the first epoch.
STEPS = {"epoch_end": 3, "train_end": 6, "validation": 1}


@pytest.mark.parametrize("rank", range(4))
@pytest.mark.parametrize("point", [*job.INSIDE, *job.OUTSIDE])
@pytest.mark.parametrize("kind", ["kill", "raise"])
def test_one_fault(kind: str, point: str, rank: int, untouched: world.Outcome, tmp_path: Path) -> None:
    outcome = world.run(Case(faults=(Fault(kind, rank, point, STEPS.get(point, 2)),)), tmp_path)
    outcome.assert_same(untouched)
    assert len(outcome.said) == (kind == "kill"), outcome.said
    assert "recovered at step" in outcome.logs


@pytest.mark.parametrize("step", [0, 3, 5])
@pytest.mark.parametrize("point", ["batch_start", "backward", "update", "train_batch_end"])
def test_the_first_step_a_new_epoch_and_the_last_step(
    point: str, step: int, untouched: world.Outcome, tmp_path: Path
) -> None:
    outcome = world.run(Case(faults=(Fault("kill", 0, point, step + (point == "train_batch_end")),)), tmp_path)
    outcome.assert_same(untouched)
    assert len(outcome.said) == 1


@pytest.mark.parametrize("rank", [0, 2])
@pytest.mark.parametrize("point", ["stop", "clean", "regroup", "repair", "rollback", "resume"])
@pytest.mark.parametrize("kind", ["kill", "raise"])
def test_a_second_fault_while_recovering(
    kind: str, point: str, rank: int, untouched: world.Outcome, tmp_path: Path
) -> None:
    faults = (Fault("kill", 1, "backward", 2), Fault(kind, rank, point, 2))
    outcome = world.run(Case(faults=faults), tmp_path)
    outcome.assert_same(untouched)
    assert len(outcome.said) == 2


@pytest.mark.parametrize("point", ["rollback", "resume"])
@pytest.mark.parametrize("kind", ["kill", "raise"])
def test_the_peer_that_gave_is_lost_next(kind: str, point: str, untouched: world.Outcome, tmp_path: Path) -> None:
    """The replacement of rank 1 has its shard from rank 3, and gives it back."""
    faults = (Fault("kill", 1, "backward", 2), Fault(kind, 3, point, 2))
    outcome = world.run(Case(faults=faults), tmp_path)
    outcome.assert_same(untouched)
    assert len(outcome.said) == 2


def test_one_fault_after_the_other(untouched: world.Outcome, tmp_path: Path) -> None:
    faults = (
        Fault("kill", 3, "forward", 0),
        Fault("raise", 2, "reduction", 1),
        Fault("kill", 3, "gather", 4),
        Fault("raise", 0, "torn", 5),
    )
    world.run(Case(faults=faults), tmp_path).assert_same(untouched)
