"""Projects of others, unchanged: as under DDP, the same if a rank is killed, and proven by `verify`."""

import functools
import os
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.downstream.projects import PROJECTS
from tests.wild.kill import Kill
from tests.wild.outcome import Outcome

pytestmark = [pytest.mark.downstream, pytest.mark.timeout(1500)]
SEEDS = range(int(os.environ.get("WILD_SEEDS", "2")))
EACH = pytest.mark.parametrize("name", PROJECTS)
OWN = r"\.ckpt/replica_zero: only in the first"  # what our checkpoints hold besides
Run = Callable[[str, str], Outcome]


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Run:
    """Runs a training that nothing befalls, once for all tests that ask."""

    @functools.cache
    def once(name: str, strategy: str) -> Outcome:
        out = tmp_path_factory.mktemp(f"{name}-{strategy}")
        outcome = PROJECTS[name].training().run(strategy, out)
        assert outcome.code == 0, outcome.output
        return outcome

    return once


@EACH
def test_it_is_as_under_ddp(name: str, run: Run) -> None:
    ours, ddp = run(name, "replica_zero"), run(name, "ddp")
    assert "replica_zero:" not in ours.output
    assert all("fit" in rank for rank in ours.ranks)
    assert ours.differences(ddp, "|".join(filter(None, [PROJECTS[name].ddp, OWN]))) == []


@EACH
@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("rank", [0, 1])
def test_a_rank_is_killed(name: str, rank: int, seed: int, run: Run, tmp_path: Path) -> None:
    untouched = run(name, "replica_zero")
    kill = Kill.choose(untouched, rank, f"{name} {rank} {seed}")
    killed = PROJECTS[name].training().run("replica_zero", tmp_path, kill)
    assert killed.code == 0, f"{kill}\n{killed.output}"
    assert f"Rank {rank} died (SIGKILL)" in killed.output
    inexact = PROJECTS[name].inexact or (PROJECTS[name].inexact_first if rank == 0 else "")
    if inexact:
        assert inexact in killed.output
        return
    assert "Not exact" not in killed.output
    assert killed.differences(untouched) == [], f"{kill}\n{killed.output}"


@EACH
def test_it_can_be_proven(name: str, tmp_path: Path) -> None:
    """Each batch and each tail again, both ranks replaced, stopped and resumed; see `lightning-replica verify`."""
    verify = (sys.executable, "-m", "lightning_replica", "verify", "--out", str(tmp_path / "verify"), "--")
    outcome = PROJECTS[name].training(*verify, limit_s=1200).run("replica_zero", tmp_path / "run")
    reasons = [reason for reason in (PROJECTS[name].inexact, PROJECTS[name].stopped) if reason]
    if reasons:
        assert outcome.code != 0, outcome.output
        assert all(reason in outcome.output for reason in reasons), outcome.output
    if not PROJECTS[name].inexact:
        assert outcome.output.count("identical") == (4 if reasons else 5), outcome.output
    if not reasons:
        assert outcome.code == 0, outcome.output
