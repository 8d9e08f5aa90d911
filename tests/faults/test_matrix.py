"""Every kind of fault, at every point, on every rank: the run ends with the bits of the untouched run."""

from pathlib import Path

import pytest

from tests.support import job, world
from tests.support.job import Case, Fault


@pytest.fixture(scope="session")
def untouched(tmp_path_factory: pytest.TempPathFactory) -> world.Outcome:
    outcome = world.run(Case(), tmp_path_factory.mktemp("untouched"))
    assert outcome.code == 0, outcome.logs
    assert not outcome.said
    return outcome


def check(outcome: world.Outcome, untouched: world.Outcome) -> None:
    assert outcome.code == 0, outcome.logs
    for rank, (got, expected) in enumerate(zip(outcome.ranks, untouched.ranks, strict=True)):
        assert got == expected, f"rank {rank}\n{outcome.logs}"
    assert outcome.batches == untouched.batches, outcome.logs


@pytest.mark.parametrize("rank", range(4))
@pytest.mark.parametrize("point", [*job.INSIDE, *job.OUTSIDE])
@pytest.mark.parametrize("kind", ["kill", "raise"])
def test_one_fault(kind: str, point: str, rank: int, untouched: world.Outcome, tmp_path: Path) -> None:
    step = {"epoch_end": 3, "train_end": 6, "validation": 1}.get(point, 2)
    outcome = world.run(Case(faults=(Fault(kind, rank, point, step),)), tmp_path)
    check(outcome, untouched)
    assert len(outcome.said) == (kind == "kill"), outcome.said
    assert "recovered at step" in outcome.logs
