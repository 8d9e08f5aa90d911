"""Faults at every point of a step that reduces and gathers on two levels; all ranks run on this machine."""

from dataclasses import replace
from pathlib import Path

import pytest

from tests.support import job, world
from tests.support.job import Case, Fault

POINTS = (*job.INSIDE, "backward")
TWO = Case(nodes=2)
SENDS = Case(nodes=2, shared_memory=False, reduce_dtype="bfloat16")
OTHERS = {
    "bfloat16": Case(nodes=2, reduce_dtype="bfloat16"),
    "sockets": Case(nodes=2, shared_memory=False),
    "one rank a node": Case(nodes=4),
    "replicas of two nodes": Case(nodes=4, devices=8),
    "replicas of two nodes, sockets": Case(nodes=4, devices=8, shared_memory=False),
    "replicas fill no node": Case(nodes=2, devices=8, replicas=4),
}


def strikes(kinds: tuple[str, ...], devices: int) -> tuple[Fault, ...]:
    """A fault at every point, in one step after the other, of each rank in turn.

    Wrong bits in the update itself would end the run: with two holders nobody can tell who is right.
    """
    points = [point for point in POINTS if "corrupt" not in kinds or point != "update"]
    return tuple(
        Fault(kinds[step % len(kinds)], (3 * step) % devices, point, step) for step, point in enumerate(points, 1)
    )


def check(case: Case, kinds: tuple[str, ...], tmp_path: Path) -> None:
    case = replace(case, accumulate=1, epochs=2 if case.devices == 4 else 4, max_tries=10)
    (tmp_path / "untouched").mkdir()
    untouched = world.run(case, tmp_path / "untouched")
    case = replace(case, faults=strikes(kinds, case.devices))
    outcome = world.run(case, tmp_path / "struck", max_restarts=20)
    outcome.assert_same(untouched)
    assert all((tmp_path / "struck" / f"fired{number}").exists() for number in range(len(case.faults))), "not reached"
    replaced = len([line for line in outcome.said if "takes its place" in line])
    assert replaced >= len([fault for fault in case.faults if fault.kind == "kill"])


@pytest.mark.parametrize(
    ("case", "kinds"), [(TWO, ("kill", "exception")), (SENDS, ("exception", "kill"))], ids=["shared memory", "sockets"]
)
def test_at_every_point(case: Case, kinds: tuple[str, ...], tmp_path: Path) -> None:
    check(case, kinds, tmp_path)


@pytest.mark.combinations
@pytest.mark.parametrize("kind", ["kill", "exception", "corrupt"])
@pytest.mark.parametrize("name", OTHERS)
def test_other_grids(name: str, kind: str, tmp_path: Path) -> None:
    check(OTHERS[name], (kind,), tmp_path)
