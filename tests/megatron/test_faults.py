"""Faults of every kind, on every coordinate: the bits are those of the untouched run."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.megatron import job
from tests.megatron.job import Case
from tests.support import world
from tests.support.job import Fault
from tests.support.world import Outcome

Untouched = Callable[[Case], Outcome]


@pytest.fixture(scope="module")
def untouched(tmp_path_factory: pytest.TempPathFactory) -> Untouched:
    known: dict[tuple[int, int], Outcome] = {}

    def find(case: Case) -> Outcome:
        sizes = case.tensor, case.pipeline
        if sizes not in known:
            known[sizes] = world.run(make(sizes), tmp_path_factory.mktemp("untouched"), target=job.run)
            assert known[sizes].code == 0, known[sizes].logs
        return known[sizes]

    return find


def make(sizes: tuple[int, int], *faults: Fault) -> Case:
    tensor, pipeline = sizes
    return Case(faults, devices=2 * tensor * pipeline, accumulate=1, epochs=1, tensor=tensor, pipeline=pipeline)


POINTS = ["forward", "backward", "before_commit", "update", "gather", "validation"]
RANKS = [((2, 1), 0), ((2, 1), 3), ((1, 2), 1), ((1, 2), 2)]
# Each point, each kind and each rank at least once; -m combinations runs all of them.
SAMPLE = [
    ("kill", "forward", 1),
    ("kill", "backward", 3),
    ("kill", "update", 0),
    ("exception", "before_commit", 2),
    ("exception", "gather", 1),
    ("kill", "validation", 2),
]


def cells() -> list[Any]:
    return [
        pytest.param(
            kind,
            point,
            *RANKS[number],
            marks=() if (kind, point, number) in SAMPLE else pytest.mark.combinations,
            id=f"{kind}-{point}-{RANKS[number]}".replace(" ", ""),
        )
        for kind in ("kill", "exception")
        for point in POINTS
        for number in range(len(RANKS))
    ]


@pytest.mark.parametrize(("kind", "point", "sizes", "rank"), cells())
def test_a_fault(
    untouched: Untouched, tmp_path: Path, kind: str, point: str, sizes: tuple[int, int], rank: int
) -> None:
    case = make(sizes, Fault(kind, rank, point, 2))
    outcome = world.run(case, tmp_path, target=job.run)
    outcome.assert_same(untouched(case))
    assert any("recovered" in line for line in outcome.said + outcome.logs.splitlines())
