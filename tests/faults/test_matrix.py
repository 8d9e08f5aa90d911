"""Every kind of fault, at every point, on every rank: the run ends with the bits of the untouched run.

Cells that cannot be reached: "logger" on other ranks than 0, which have none. A bit that flips between the last look
at a shard and its update ("update", "torn") is for two holders the same as an update that computes wrong bits: nobody
can tell who is right, and the run ends with an error that says so (with three it is repaired, test_wrong_bits.py).
"""

import itertools
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.support import job, world
from tests.support.job import Case, Fault

KINDS = ("kill", "exit", "exception", "memory", "corrupt", "hang")
POINTS = ("first_step", *job.INSIDE, *job.OUTSIDE)
WHO = {"rank 0": (0,), "last rank": (3,), "two shards": (0, 3)}
ACCUMULATE = (1, 4)
BATCHES = 6  # in an epoch
NEW = ("kill", "exit", "hang")  # where a new process comes


def step_of(point: str, accumulate: int) -> int:
    """Updates that are applied where a fault is aimed: in the middle of the first epoch, if the point is there."""
    epoch = -(-BATCHES // accumulate)
    middle = epoch // 2
    known = {"first_step": 0, "epoch_end": epoch, "train_end": 2 * epoch, "validation": 3 // accumulate}
    after = {"train_batch_end": middle + 1, "scheduler": middle + 1, "checkpoint": 2, "logger": middle + 1}
    return {**known, **after}.get(point, middle)


def cells() -> Iterator[tuple[str, str, str, int]]:
    for kind, point, who, accumulate in itertools.product(KINDS, POINTS, WHO, ACCUMULATE):
        if point != "logger" or who == "rank 0":
            yield kind, point, who, accumulate


def sample() -> list[tuple[str, str, str, int]]:
    """Of each kind at each point one cell, another place of the table for each; of hangs none (launch/test_hang.py).

    Of "exit", which is like "kill", and of "memory", which is like "exception", at every other point.
    """
    by_place: dict[tuple[str, str], list[Any]] = {}
    for cell in cells():
        by_place.setdefault(cell[:2], []).append(cell)
    half = {"exit": 0, "memory": 1}
    kept = [
        found
        for (kind, point), found in by_place.items()
        if kind != "hang" and half.get(kind, POINTS.index(point) % 2) == POINTS.index(point) % 2
    ]
    return [found[number * 5 % len(found)] for number, found in enumerate(kept)]


@pytest.fixture(scope="module")
def oracles(tmp_path_factory: pytest.TempPathFactory) -> dict[int, world.Outcome]:
    return {a: world.run(Case(accumulate=a), tmp_path_factory.mktemp("untouched")) for a in ACCUMULATE}


def run_cell(
    cell: tuple[str, str, str, int], oracles: dict[int, world.Outcome], tmp_path: Path, **options: Any
) -> world.Outcome:
    kind, point, who, accumulate = cell
    step, aim = step_of(point, accumulate), "batch_start" if point == "first_step" else point
    faults = tuple(Fault(kind, rank, aim, step) for rank in WHO[who])
    outcome = world.run(Case(faults, accumulate=accumulate, hang=(1.0, 8.0), **options), tmp_path)
    assert all((tmp_path / f"fired{number}").exists() for number in range(len(faults))), "not reached"
    if kind == "corrupt" and point in ("update", "torn"):
        assert outcome.code == 1
        assert "none of its holders" in outcome.logs
        return outcome
    outcome.assert_same(oracles[accumulate])
    assert len([line for line in outcome.said if "takes its place" in line]) == (len(faults) if kind in NEW else 0)
    # A flipped weight may be overwritten where the next window takes in what hooks have written: nobody is the wiser.
    assert "recovered at step" in outcome.logs or kind == "corrupt"
    return outcome


@pytest.mark.parametrize("cell", sample(), ids=str)
def test_one_fault(cell: tuple[str, str, str, int], oracles: dict[int, world.Outcome], tmp_path: Path) -> None:
    run_cell(cell, oracles, tmp_path)


@pytest.mark.combinations
@pytest.mark.parametrize("cell", list(cells()), ids=str)
def test_the_whole_table(cell: tuple[str, str, str, int], oracles: dict[int, world.Outcome], tmp_path: Path) -> None:
    run_cell(cell, oracles, tmp_path)


@pytest.mark.parametrize("rank", [1, 2])  # the others are in the sample
@pytest.mark.parametrize("point", [*job.INSIDE, "torn"])
def test_other_ranks_inside_a_step(point: str, rank: int, untouched: world.Outcome, tmp_path: Path) -> None:
    outcome = world.run(Case(faults=(Fault("kill", rank, point, 2),)), tmp_path)
    outcome.assert_same(untouched)
    assert len(outcome.said) == 1


@pytest.mark.parametrize("step", [0, 3, 5])
@pytest.mark.parametrize("point", ["batch_start", "update", "train_batch_end"])
def test_the_first_step_a_new_epoch_and_the_last_step(
    point: str, step: int, untouched: world.Outcome, tmp_path: Path
) -> None:
    outcome = world.run(Case(faults=(Fault("kill", 0, point, step + (point == "train_batch_end")),)), tmp_path)
    outcome.assert_same(untouched)
    assert len(outcome.said) == 1


SECOND = [
    *itertools.product(["kill", "exception"], ["stop", "clean", "regroup", "repair", "rollback", "resume"], [0, 2]),
    # The replacement of rank 1 has its shard from rank 3, and gives it back.
    *itertools.product(["kill", "exception"], ["rollback", "resume"], [3]),
]


@pytest.mark.parametrize(("kind", "point", "rank"), SECOND)
def test_a_second_fault_while_recovering(
    kind: str, point: str, rank: int, untouched: world.Outcome, tmp_path: Path
) -> None:
    faults = (Fault("kill", 1, "backward", 2), Fault(kind, rank, point, 2))
    outcome = world.run(Case(faults=faults), tmp_path)
    outcome.assert_same(untouched)
    assert len(outcome.said) == 2  # a rank that raises in the recovery itself ends, and is replaced


def test_one_fault_after_the_other(untouched: world.Outcome, tmp_path: Path) -> None:
    faults = (
        Fault("kill", 3, "forward", 0),
        Fault("exception", 2, "reduction", 1),
        Fault("kill", 3, "gather", 4),
        Fault("exception", 0, "torn", 5),
    )
    world.run(Case(faults=faults), tmp_path).assert_same(untouched)
