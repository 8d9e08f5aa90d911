"""Every kind of fault, at every point, on every rank: the run ends with the bits of the untouched run.

The sample strikes a run several times, one fault after the other; in the whole table each fault has a run of its own.

Cells that cannot be reached: "logger" on other ranks than 0, which have none. A bit that flips between the last look
at a shard and its update ("update", "torn") is for two holders the same as an update that computes wrong bits: nobody
can tell who is right, and the run ends with an error that says so (with three it is repaired, test_wrong_bits.py).
"""

import functools
import itertools
from collections.abc import Callable, Iterator
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
TWICE = "which may be there twice"  # of the row of a logger that nobody but its author knows


def step_of(point: str, accumulate: int, epochs: int = 2) -> int:
    """Updates that are applied where a fault is aimed: in the middle of the first epoch, if the point is there."""
    epoch = -(-BATCHES // accumulate)
    middle = epoch // 2
    known = {"first_step": 0, "epoch_end": epoch, "train_end": epochs * epoch, "validation": 3 // accumulate}
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


Oracles = Callable[[int, int], world.Outcome]


@pytest.fixture(scope="module")
def oracles(tmp_path_factory: pytest.TempPathFactory) -> Oracles:
    """The untouched run, by batches accumulated and epochs."""

    @functools.cache
    def run(accumulate: int, epochs: int) -> world.Outcome:
        return world.run(Case(accumulate=accumulate, epochs=epochs), tmp_path_factory.mktemp("untouched"))

    return run


def run_cell(cell: tuple[str, str, str, int], oracles: Oracles, tmp_path: Path, **options: Any) -> world.Outcome:
    kind, point, who, accumulate = cell
    step, aim = step_of(point, accumulate), "batch_start" if point == "first_step" else point
    faults = tuple(Fault(kind, rank, aim, step) for rank in WHO[who])
    hang = (1.0, 8.0) if kind == "hang" else job.HANG
    outcome = world.run(Case(faults, accumulate=accumulate, hang=hang, **options), tmp_path)
    assert all((tmp_path / f"fired{number}").exists() for number in range(len(faults))), "not reached"
    if kind == "corrupt" and point in ("update", "torn"):
        assert outcome.code == 1
        assert "none of its holders" in outcome.logs
        return outcome
    outcome.assert_same(oracles(accumulate, 2), TWICE if kind in NEW and point == "logger" else "")
    assert len([line for line in outcome.said if "takes its place" in line]) == (len(faults) if kind in NEW else 0)
    # Before the first step no rank has read the shard, and the first window takes it from the weights.
    assert "recovered at step" in outcome.logs or (kind, point) == ("corrupt", "first_step")
    return outcome


ANYWHERE = (*job.INSIDE, "forward", "backward", "torn", "train_batch_end", "scheduler", "logger")


SEVERAL = 4  # faults in a run
LONG = {1: 2, 4: 4}  # epochs in which they fit, by batches accumulated


def ends_the_run(cell: tuple[str, str, str, int]) -> bool:
    return cell[0] == "corrupt" and cell[1] in ("update", "torn")


def several() -> list[list[tuple[str, str, str, int]]]:
    """The sample in groups that strike one run, each of another kind at another point."""
    groups: list[list[tuple[str, str, str, int]]] = []
    for cell in (cell for cell in sample() if not ends_the_run(cell)):
        fits = [
            group
            for group in groups
            if group[0][3] == cell[3]
            and len(group) < SEVERAL
            and all(kind != cell[0] and point != cell[1] for kind, point, _, _ in group)
        ]
        if fits:
            fits[0].append(cell)
        else:
            groups.append([cell])
    return groups


def name_of(group: list[tuple[str, str, str, int]]) -> str:
    return ", ".join(f"{kind} {point}" for kind, point, _, _ in group)


@pytest.mark.parametrize("group", several(), ids=name_of)
def test_faults_at_every_point(group: list[tuple[str, str, str, int]], oracles: Oracles, tmp_path: Path) -> None:
    faults, new, may_be_new = [], 0, 0
    epochs = LONG[group[0][3]]
    for number, (kind, point, who, accumulate) in enumerate(group):
        aim = "batch_start" if point == "first_step" else point
        # A fault may leave out the rest of its step, and the beginning of the next: so they are two steps apart.
        later = 2 * number - (2 if accumulate == 1 else 0)
        step = step_of(point, accumulate, epochs) + later * (point in ANYWHERE)
        faults += [Fault(kind, rank, aim, step) for rank in WHO[who]]
        new += len(WHO[who]) * (kind in NEW)
        may_be_new += len(WHO[who])
    case = Case(tuple(faults), accumulate=accumulate, epochs=epochs, max_tries=10)
    outcome = world.run(case, tmp_path, max_restarts=20)
    lost_in_a_row = any(kind in NEW and point == "logger" for kind, point, _, _ in group)
    outcome.assert_same(oracles(accumulate, epochs), TWICE if lost_in_a_row else "")
    assert all((tmp_path / f"fired{number}").exists() for number in range(len(faults))), "not reached"
    # A rank that raises while it recovers from another fault ends, and is replaced.
    assert new <= len([line for line in outcome.said if "takes its place" in line]) <= may_be_new


@pytest.mark.parametrize("cell", [cell for cell in sample() if ends_the_run(cell)], ids=str)
def test_a_fault_that_ends_the_run(cell: tuple[str, str, str, int], oracles: Oracles, tmp_path: Path) -> None:
    run_cell(cell, oracles, tmp_path)


@pytest.mark.combinations
@pytest.mark.parametrize("cell", list(cells()), ids=str)
def test_the_whole_table(cell: tuple[str, str, str, int], oracles: Oracles, tmp_path: Path) -> None:
    run_cell(cell, oracles, tmp_path)


@pytest.mark.parametrize("points", [job.INSIDE[:4], (*job.INSIDE[4:], "torn")], ids=", ".join)
def test_other_ranks_inside_a_step(points: tuple[str, ...], untouched: world.Outcome, tmp_path: Path) -> None:
    """Ranks 1 and 2 are killed at each point, one step after the other."""
    faults = [Fault("kill", rank, point, step) for step, point in enumerate(points, 1) for rank in (1, 2)]
    outcome = world.run(Case(faults=tuple(faults)), tmp_path, max_restarts=20)
    outcome.assert_same(untouched)
    assert len(outcome.said) == len(faults)


@pytest.mark.parametrize("point", ["batch_start", "update", "train_batch_end"])
def test_the_first_step_a_new_epoch_and_the_last_step(point: str, untouched: world.Outcome, tmp_path: Path) -> None:
    faults = tuple(Fault("kill", 0, point, step + (point == "train_batch_end")) for step in (0, 3, 5))
    outcome = world.run(Case(faults=faults), tmp_path)
    outcome.assert_same(untouched)
    assert len(outcome.said) == len(faults)


SECOND = [
    *itertools.product(["kill", "exception"], ["stop", "clean", "regroup", "repair", "rollback", "resume"], [0, 2]),
    # The replacement of rank 1 has its shard from rank 3, and gives it back.
    *itertools.product(["kill", "exception"], ["rollback", "resume"], [3]),
]


@pytest.mark.parametrize("number", range(-(-len(SECOND) // 4)))
def test_a_second_fault_while_recovering(number: int, untouched: world.Outcome, tmp_path: Path) -> None:
    """Four times in a run: rank 1 is killed, and another rank fails while the others recover from that."""
    faults: list[Fault] = []
    for step, (kind, point, rank) in enumerate(SECOND[number :: -(-len(SECOND) // 4)], 1):
        faults += [Fault("kill", 1, "backward", step), Fault(kind, rank, point, step)]
    outcome = world.run(Case(faults=tuple(faults)), tmp_path, max_restarts=20)
    outcome.assert_same(untouched)
    assert len(outcome.said) == len(faults)  # a rank that raises in the recovery itself ends, and is replaced


def test_one_fault_after_the_other(untouched: world.Outcome, tmp_path: Path) -> None:
    faults = (
        Fault("kill", 3, "forward", 0),
        Fault("exception", 2, "reduction", 1),
        Fault("kill", 3, "gather", 4),
        Fault("exception", 0, "torn", 5),
    )
    world.run(Case(faults=faults), tmp_path).assert_same(untouched)
