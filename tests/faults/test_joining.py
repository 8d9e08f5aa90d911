"""Faults while a rank without inputs shadows the others' steps: the bits are those of the untouched run."""

from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from lightning_replica.exit_codes import GASP_WRITTEN
from tests.support import world
from tests.support.job import INSIDE, Fault
from tests.trainer.joins import Uneven, run

# Two epochs of five steps. Rank 0 shadows the last three of each.
KINDS: dict[str, dict[str, Any]] = {
    "sized": {},
    "no length": {"sized": False},
    "fewer later": {"epoch_lengths": ((3, 7), (2, 5))},
    "windows": {"accumulate": 2, "lengths": (3, 7), "sized": False, "workers": 1},
}


def case(kind: str, *faults: Fault) -> Uneven:
    options = {"lengths": (2, 5), "epochs": 2, "batch_norm": True, "clip": 0.5, "checkpoints": True}
    return Uneven(faults, devices=2, **{**options, **KINDS[kind]})


@pytest.fixture(scope="session")
def untouched(tmp_path_factory: pytest.TempPathFactory) -> Any:
    @cache
    def trained(kind: str) -> world.Outcome:
        outcome = world.run(case(kind), tmp_path_factory.mktemp("untouched"), target=run)
        assert outcome.code == 0, outcome.logs
        return outcome

    return trained


def check(kind: str, faults: tuple[Fault, ...], untouched: Any, out: Path) -> None:
    outcome = world.run(case(kind, *faults), out, target=run)
    outcome.assert_same(untouched(kind))
    assert all((out / f"fired{number}").exists() for number in range(len(faults))), "a fault never came"


# Each kind of data, each point and each rank at least once; -m combinations runs all of them.
CELLS = [(kind, rank, point) for kind in KINDS if kind != "fewer later" for rank in (0, 1) for point in INSIDE]
SAMPLE = CELLS[::4]


@pytest.mark.parametrize(
    ("kind", "rank", "point"),
    [pytest.param(*cell, marks=() if cell in SAMPLE else pytest.mark.combinations) for cell in CELLS],
)
def test_a_rank_dies_while_one_shadows(kind: str, rank: int, point: str, untouched: Any, tmp_path: Path) -> None:
    step = 3 if kind == "windows" else 4
    check(kind, (Fault("kill", rank, point, step - (point not in ("gather", "batch_end"))),), untouched, tmp_path)


@pytest.mark.parametrize(
    ("what", "rank", "kind"), [("exception", 0, "no length"), ("hang", 0, "sized"), ("corrupt", 1, "sized")]
)
def test_other_faults(what: str, rank: int, kind: str, untouched: Any, tmp_path: Path) -> None:
    check(kind, (Fault(what, rank, "before_commit", 3),), untouched, tmp_path)


@pytest.mark.parametrize("point", ["stop", "clean", "regroup", "repair", "rollback", "resume"])
@pytest.mark.parametrize("kind", ["no length"])
def test_the_shadow_dies_while_the_other_recovers(kind: str, point: str, untouched: Any, tmp_path: Path) -> None:
    faults = Fault("exception", 1, "forward", 3), Fault("kill", 0, point, None)
    check(kind, faults, untouched, tmp_path)


@pytest.mark.parametrize("rank", [0, 1])
def test_the_lengths_of_a_later_epoch(rank: int, untouched: Any, tmp_path: Path) -> None:
    """A replacement makes its loaders as in the first epoch, and joins in the second, which is shorter."""
    check("fewer later", (Fault("kill", rank, "after_commit", 10),), untouched, tmp_path)


@pytest.mark.parametrize("kind", KINDS)
def test_a_run_ends_early_and_resumes(kind: str, untouched: Any, tmp_path: Path) -> None:
    """Both ranks are told to end while one shadows. Hooks of the step that is not begun are not called twice."""
    early = replace(case(kind, Fault("sigterm", 0, "before_commit", 2)), gasp=True, checkpoints=False)
    assert world.run(early, tmp_path, target=run).code == GASP_WRITTEN
    outcome = world.run(replace(early, faults=()), tmp_path, target=run)
    assert outcome.code == 0, outcome.logs
    expected = untouched(kind)
    for name in ("weights", "metrics", "step", "rate", "random"):
        assert [rank[name] for rank in outcome.ranks] == [rank[name] for rank in expected.ranks], name


@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind != "fewer later"])
def test_the_last_batch_of_an_epoch(kind: str, rank: int, untouched: Any, tmp_path: Path) -> None:
    check(kind, (Fault("kill", rank, "epoch_end", 4 if kind == "windows" else 5),), untouched, tmp_path)
