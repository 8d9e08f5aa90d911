"""Trainings that other people have written, unchanged: as under DDP, and the same if a rank is killed from outside."""

import os
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.support.hydra_scripts import hydra_starts
from tests.wild.kill import Kill
from tests.wild.outcome import Outcome
from tests.wild.table import LIKE_DDP, SAMPLE, SCRIPTS

SEEDS = range(int(os.environ.get("WILD_SEEDS", "5")))
Run = Callable[[str, str], Outcome]

SCRIPT = pytest.mark.parametrize(
    "name", [pytest.param(name, marks=() if name in LIKE_DDP else pytest.mark.combinations) for name in SCRIPTS]
)


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Run:
    """Runs a script that nothing befalls, once for all tests that ask."""
    known: dict[tuple[str, str], Outcome] = {}

    def once(name: str, strategy: str) -> Outcome:
        missing = [variable for variable in SCRIPTS[name].packages if variable not in os.environ]
        if missing:
            pytest.skip(f"{missing[0]} names no directory with that package")
        if name.startswith("hydra") and not hydra_starts():
            pytest.skip("this Hydra does not start under this Python")
        if (name, strategy) not in known:
            out = tmp_path_factory.mktemp(f"{name}-{strategy}")
            known[name, strategy] = SCRIPTS[name].run(strategy, out)
        return known[name, strategy]

    return once


@SCRIPT
def test_it_is_as_under_ddp(name: str, run: Run) -> None:
    ddp, ours = run(name, "ddp"), run(name, "replica_zero")
    assert ddp.code == 0, ddp.output
    assert ours.code == 0, ours.output
    assert "replica_zero:" not in ours.output
    assert len(ours.ranks) == 2
    assert all("fit" in rank for rank in ours.ranks)
    assert ours.differences(ddp, "|".join(filter(None, [SCRIPTS[name].varies, SCRIPTS[name].ddp, OWN]))) == []


OWN = r"\.ckpt/replica_zero: only in the first"  # what our checkpoints hold besides


def killed_like_untouched(name: str, rank: int, seed: int, run: Run, out: Path) -> None:
    untouched = run(name, "replica_zero")
    assert untouched.code == 0, untouched.output
    kill = Kill.choose(untouched, rank, f"{name} {rank} {seed}")
    killed = SCRIPTS[name].run("replica_zero", out, kill)
    assert killed.code == 0, f"{kill}\n{killed.output}"
    assert f"Rank {rank} died (SIGKILL)" in killed.output
    assert killed.differences(untouched, SCRIPTS[name].varies) == [], f"{kill}\n{killed.output}"
    assert "NOT EXACT" not in killed.output


@pytest.mark.parametrize(("name", "rank"), [(name, rank) for name, rank in SAMPLE.items()])
def test_a_killed_rank_changes_nothing(name: str, rank: int, run: Run, tmp_path: Path) -> None:
    killed_like_untouched(name, rank, 0, run, tmp_path)


@pytest.mark.combinations
@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize("name", SCRIPTS)
def test_whoever_is_killed_whenever(name: str, rank: int, seed: int, run: Run, tmp_path: Path) -> None:
    killed_like_untouched(name, rank, seed, run, tmp_path)
