"""One untouched run for all tests that compare with it."""

from pathlib import Path

import pytest

from tests.support import world
from tests.support.world import Outcome
from tests.tensor_parallel import job


@pytest.fixture(scope="package")
def untouched_at(tmp_path_factory: pytest.TempPathFactory) -> tuple[Outcome, Path]:
    """What it came to, and the directory in which its checkpoints are."""
    out = tmp_path_factory.mktemp("untouched")
    outcome = world.run(job.make(), out, target=job.run)
    assert outcome.code == 0, outcome.logs
    return outcome, out


@pytest.fixture
def untouched(untouched_at: tuple[Outcome, Path]) -> Outcome:
    return untouched_at[0]


@pytest.fixture
def saved(untouched_at: tuple[Outcome, Path]) -> Path:
    """A checkpoint in the middle of it."""
    return untouched_at[1] / "checkpoints" / "step=2.ckpt"
