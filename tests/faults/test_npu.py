"""Trainings on a simulated NPU, with the errors that one can have: they end with the bits of the untouched run on CPUs.

What the simulation does, and what it makes of whoever relies on work that a stopped device has not done:
tests/support/simulated_npu.py. Each fault stops the devices of all ranks, wherever they are.

Faults that take no process come by the dozen in one training; the table of single ones is behind ``-m combinations``.
"""

import itertools
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from lightning_replica import register_fault
from lightning_replica.core.digests import GuardMode
from lightning_replica.exit_codes import DEVICE_LOST, GASP_WRITTEN, NOTHING_SAVED
from tests.support import job, world
from tests.support.job import Case, Fault
from tests.support.simulated_npu import RESUMED

NPU = "simulated npu"
# What an error leaves: all, or all but the shard, or not even the process.
INTACT = ("npu uce 0", "npu uce 2", "npu link", "npu ub link", "npu remote", "npu retry", "npu oom")
HIT = ("npu uce 3 main", "npu uce 3 optimizer", "npu uce 3 params", "npu uce 3 grads")
LOST = (
    "npu uce 1",
    "npu uce 3 buffers",
    "npu unknown uce",
    "npu ecc now",
    "npu suspect",
    "npu heartbeat",
    "npu unsafe",
)
GONE = (*LOST, "kill", "exit")
KINDS = (*INTACT, *HIT, *GONE, "exception")
POINTS = (*job.INSIDE, "forward", "backward", "torn", "scheduler", "train_batch_end", "validation", "epoch_end")
WHO = {"rank 0": (0,), "last rank": (3,), "two shards": (0, 3)}
PHASES = ("stop", "clean", "regroup", "repair", "rollback", "resume")


def replaced(outcome: world.Outcome) -> int:
    return len([line for line in outcome.said if "takes its place" in line])


def moved(outcome: world.Outcome) -> int:
    return len(re.findall(r"rank \d has its shard from rank", outcome.logs))


def reached(faults: tuple[Fault, ...], out: Path) -> bool:
    return all((out / f"fired{number}").exists() for number in range(len(faults)))


# Many in one training

LONG: dict[str, Any] = {"accumulate": 1, "epochs": 4}  # 24 steps
# Updates applied where a fault comes: to each point in another step, and between any two of them one is done.
DUE = dict(zip(POINTS, (1, 2, 3, 4, 5, 7, 8, 9, 10, 11, 13, 14, 15, 18), strict=True))


@pytest.fixture(scope="module")
def long(tmp_path_factory: pytest.TempPathFactory) -> world.Outcome:
    outcome = world.run(Case(**LONG), tmp_path_factory.mktemp("untouched"))
    assert outcome.code == 0, outcome.logs
    return outcome


def one_after_the_other(kinds: tuple[str, ...], points: tuple[str, ...], shift: int) -> tuple[Fault, ...]:
    """At each point another kind, on another rank."""
    return tuple(
        Fault(kinds[(place + shift) % len(kinds)], (place * 3 + shift) % 4, point, DUE[point])
        for place, point in enumerate(points)
    )


def repair_in_place(shift: int, guard: GuardMode, long: world.Outcome, tmp_path: Path) -> None:
    faults = one_after_the_other((*INTACT, *HIT), POINTS, shift)
    outcome = world.run(Case(faults, accelerator=NPU, guard=guard, **LONG), tmp_path)
    outcome.assert_same(long)
    assert reached(faults, tmp_path)
    assert not outcome.said
    assert outcome.logs.count("recovered at step") == len(faults)
    torn = [fault for fault in faults if fault.kind in HIT or fault.point in ("update", "torn")]
    assert moved(outcome) == len(torn)
    assert outcome.logs.count(RESUMED) == 4 * len(faults)


@pytest.mark.parametrize(("shift", "guard"), [(0, "sampled"), (4, "off")])
def test_what_is_repaired_in_place(shift: int, guard: GuardMode, long: world.Outcome, tmp_path: Path) -> None:
    repair_in_place(shift, guard, long, tmp_path)


@pytest.mark.combinations
@pytest.mark.parametrize("shift", range(len(INTACT + HIT)))
@pytest.mark.parametrize("guard", ["full", "sampled", "off"])
def test_everything_that_is_repaired_in_place(
    shift: int, guard: GuardMode, long: world.Outcome, tmp_path: Path
) -> None:
    repair_in_place(shift, guard, long, tmp_path)


@pytest.mark.parametrize("shift", [0])
def test_what_takes_the_process(shift: int, long: world.Outcome, tmp_path: Path) -> None:
    faults = one_after_the_other(GONE, POINTS[shift::3], shift)
    outcome = world.run(Case(faults, accelerator=NPU, **LONG), tmp_path, max_restarts=len(faults))
    outcome.assert_same(long)
    assert reached(faults, tmp_path)
    assert replaced(outcome) == len(faults)
    assert RESUMED not in outcome.logs  # who is new has none
    codes = [f"ended with exit code {DEVICE_LOST} because it lost its device" in line for line in outcome.said]
    assert codes == [fault.kind in LOST for fault in faults]


# One at a time

STEPS = {"train_batch_end": 3, "scheduler": 3, "validation": 1, "epoch_end": 3}  # updates applied there; elsewhere 2
Cell = tuple[str, str, str]
AT_ONCE: list[Cell] = [
    ("npu uce 3 main", "before_commit", "two shards"),
    ("npu ecc now", "update", "two shards"),
    ("exception", "torn", "two shards"),
]


def cells() -> Iterator[Cell]:
    return itertools.product(KINDS, POINTS, WHO)


def run_cell(cell: Cell, untouched: world.Outcome, tmp_path: Path) -> None:
    kind, point, who = cell
    faults = tuple(Fault(kind, rank, point, STEPS.get(point, 2)) for rank in WHO[who])
    outcome = world.run(Case(faults, accelerator=NPU), tmp_path)
    outcome.assert_same(untouched)
    assert reached(faults, tmp_path)
    assert replaced(outcome) == (len(faults) if kind in GONE else 0), outcome.said
    assert "recovered at step" in outcome.logs
    if kind in HIT:
        assert moved(outcome) == len(faults)


@pytest.mark.parametrize("cell", AT_ONCE, ids=str)
def test_two_at_once(cell: Cell, untouched: world.Outcome, tmp_path: Path) -> None:
    run_cell(cell, untouched, tmp_path)


@pytest.mark.combinations
@pytest.mark.parametrize("cell", list(cells()), ids=str)
def test_the_whole_table(cell: Cell, untouched: world.Outcome, tmp_path: Path) -> None:
    run_cell(cell, untouched, tmp_path)


def test_a_link_that_fails_on_every_rank(untouched: world.Outcome, tmp_path: Path) -> None:
    """Not as if every rank had raised an exception of the user's."""
    faults = tuple(Fault("npu link", rank, "reduction", 2) for rank in range(4))
    world.run(Case(faults, accelerator=NPU), tmp_path).assert_same(untouched)


def test_connections_that_do_not_come_back(untouched: world.Outcome, tmp_path: Path) -> None:
    """The others' would: they are stopped again, and all make new ones."""
    outcome = world.run(Case((Fault("npu dead link", 1, "reduction", 2),), accelerator=NPU), tmp_path)
    outcome.assert_same(untouched)
    assert not outcome.said
    assert outcome.logs.count(RESUMED) <= 3  # of those who were not stopped before that
    assert "cannot resume its connections" in outcome.logs


def test_the_same_error_again_and_again(tmp_path: Path) -> None:
    faults = tuple(Fault("npu oom", 1, "backward", 2) for _ in range(6))
    outcome = world.run(Case(faults, accelerator=NPU), tmp_path)
    assert outcome.code != 0
    assert "The same step has failed 4 times (max_tries=3)" in outcome.logs
    assert "rank 1: NPU out of memory" in outcome.logs


def knows_better(case: Case, out: Path) -> None:
    register_fault("^at backward of step", "retry")
    job.run(case, out)


def test_an_exception_that_the_user_knows(untouched: world.Outcome, tmp_path: Path) -> None:
    """Raised on every rank it would otherwise be the end."""
    faults = tuple(Fault("exception", rank, "backward", 2) for rank in range(4))
    outcome = world.run(Case(faults, accelerator=NPU), tmp_path, target=knows_better)
    outcome.assert_same(untouched)
    assert "device error" in outcome.logs


# While recovering

Second = tuple[str, str, str, int]
FIRST = ("npu uce 3 main", "kill")
SECOND: list[Second] = [
    *itertools.product(FIRST, ("npu link", "npu uce 3 main", "npu suspect"), PHASES, (0, 2)),
    # Rank 1 has its shard from rank 3, and gives it back.
    *itertools.product(FIRST, ("npu link", "npu uce 3 main", "npu suspect"), ("rollback", "resume"), (3,)),
]


def run_second(second: Second, untouched: world.Outcome, tmp_path: Path) -> None:
    first, kind, phase, rank = second
    faults = (Fault(first, 1, "backward", 2), Fault(kind, rank, phase, None))
    outcome = world.run(Case(faults, accelerator=NPU), tmp_path)
    outcome.assert_same(untouched)
    assert reached(faults, tmp_path)
    assert replaced(outcome) == (first == "kill") + (kind == "npu suspect")


@pytest.mark.parametrize("second", SECOND[2::13], ids=str)
def test_a_second_error_while_recovering(second: Second, untouched: world.Outcome, tmp_path: Path) -> None:
    run_second(second, untouched, tmp_path)


@pytest.mark.combinations
@pytest.mark.parametrize("second", SECOND, ids=str)
def test_every_second_error_while_recovering(second: Second, untouched: world.Outcome, tmp_path: Path) -> None:
    run_second(second, untouched, tmp_path)


# The end


@pytest.mark.parametrize("gasp", [False, True])
def test_an_error_that_may_be_in_every_shard(gasp: bool, tmp_path: Path) -> None:
    """It is older than the newest update: nothing that is left may be written."""
    outcome = world.run(Case((Fault("npu ecc old", 1, "backward", 2),), accelerator=NPU, gasp=gasp), tmp_path)
    assert outcome.code == (NOTHING_SAVED if gasp else 1)
    assert "may have happened before the newest update" in outcome.logs
    assert not [*tmp_path.glob("gasp/step_*")]


def test_a_last_checkpoint(untouched: world.Outcome, tmp_path: Path) -> None:
    """The devices of those who are left go on, to write it; CPUs go on from there."""
    case = Case((Fault("npu suspect", 1, "backward", 2),), accelerator=NPU, gasp=True)
    outcome = world.run(case, tmp_path / "first", max_restarts=0)
    assert outcome.code == GASP_WRITTEN, outcome.logs
    (path,) = (tmp_path / "first" / "gasp").glob("step*")
    again = world.run(Case(load=str(path)), tmp_path / "again")
    assert again.code == 0, again.logs
    assert [rank["main"] for rank in again.ranks] == [rank["main"] for rank in untouched.ranks]
