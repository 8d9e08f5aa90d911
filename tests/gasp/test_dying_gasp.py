"""A run that cannot go on, and the one that goes on from what it left: the untouched run, to the last bit."""

from pathlib import Path

import pytest

from lightning_replica.exit_codes import GASP_WRITTEN
from tests.support import world
from tests.support.job import Case, Fault


@pytest.fixture(scope="module")
def untouched(tmp_path_factory: pytest.TempPathFactory) -> world.Outcome:
    return world.run(Case(), tmp_path_factory.mktemp("untouched"))


def resumed(case: Case, out: Path) -> world.Outcome:
    """Runs ``case`` to its end, and goes on from what it has left."""
    ended = world.run(case, out, max_restarts=0)
    assert ended.code == GASP_WRITTEN, f"{ended.code} {ended.said}\n{ended.logs}"
    (left,) = (out / "gasp").iterdir()
    return world.run(Case(gasp=True, load=str(left)), out, max_restarts=0)


MOMENTS = [
    ("batch_start", 0),
    ("backward", 2),
    ("reduction", 2),
    ("after_commit", 2),
    ("update", 2),
    ("gather", 2),
    ("scheduler", 2),
    ("train_batch_end", 3),
    ("validation", 3),
    ("epoch_end", 3),
    ("save", 4),
]


@pytest.mark.parametrize(("point", "step"), MOMENTS)
def test_a_rank_is_killed_and_not_replaced(point: str, step: int, untouched: world.Outcome, tmp_path: Path) -> None:
    case = Case(faults=(Fault("kill", 1, point, step),), gasp=True)
    resumed(case, tmp_path).assert_same(untouched)
