"""Faults of every kind, on every tensor rank: the bits are those of the untouched run."""

from pathlib import Path
from typing import Any

import pytest

from tests.support import world
from tests.support.job import Fault
from tests.support.world import Outcome
from tests.tensor_parallel import job
from tests.tensor_parallel.job import make

POINTS = ["forward", "backward", "before_commit", "update", "gather", "validation"]
# Each point, each kind and each rank at least once; -m combinations runs all of them.
SAMPLE = [
    ("kill", "forward", 1),
    ("kill", "backward", 3),
    ("kill", "update", 0),
    ("exception", "before_commit", 2),
    ("exception", "gather", 1),
    ("exception", "backward", 0),
]


def cells() -> list[Any]:
    return [
        pytest.param(kind, point, rank, marks=() if (kind, point, rank) in SAMPLE else pytest.mark.combinations)
        for kind in ("kill", "exception")
        for point in POINTS
        for rank in range(4)
    ]


def test_a_rank_that_is_lost_in_a_later_fit_takes_its_part_of_the_earlier_ones_result(tmp_path: Path) -> None:
    """Its part has another size than those of other tensor ranks, as 5 columns are divided among 2."""
    options = {"fits": 2, "width": 5, "plain": True}
    untouched = world.run(make(**options), tmp_path / "untouched", target=job.run)
    assert untouched.code == 0, untouched.logs
    lost = world.run(make(Fault("kill", 2, "forward", 2), **options), tmp_path / "lost", target=job.run)
    lost.assert_same(untouched)


@pytest.mark.parametrize(("kind", "point", "rank"), cells())
def test_a_fault(untouched: Outcome, tmp_path: Path, kind: str, point: str, rank: int) -> None:
    outcome = world.run(make(Fault(kind, rank, point, 2)), tmp_path, target=job.run)
    outcome.assert_same(untouched)
    assert any("recovered" in line for line in outcome.said + outcome.logs.splitlines())
