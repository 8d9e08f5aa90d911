"""When recovery cannot help, the run ends: soon, with one clear error, never by hanging."""

from pathlib import Path

import pytest

from lightning_replica.exit_codes import GAVE_UP
from lightning_replica.recovery.recovery import _still_hold
from tests.support import world
from tests.support.job import Case, Fault


@pytest.mark.parametrize("rank", [0, 3])
def test_no_replacement_can_be_had(rank: int, tmp_path: Path) -> None:
    outcome = world.run(Case(faults=(Fault("kill", rank, "backward", 2),)), tmp_path, max_restarts=0)
    assert outcome.code == GAVE_UP
    assert outcome.said == [f"Rank {rank} died (SIGKILL), and no replacement can be had: 0 of max_restarts=0 are used."]
    assert outcome.logs.count("RecoveryError: Rank") >= 3  # every survivor says why it ends
    left = {
        0: "Rank 0 held shard 0 at step 2; rank 2 still holds it.",
        3: "Rank 3 held shard 1 at step 2; rank 1 still holds it.",
    }
    assert outcome.logs.count(left[rank]) >= 3


@pytest.mark.parametrize(
    ("ranks", "clause"),
    [
        ([], "no other rank holds it"),
        ([0], "rank 0 still holds it"),
        ([0, 2, 4], "ranks 0, 2 and 4 still hold it"),
    ],
)
def test_who_still_holds_a_shard(ranks: list[int], clause: str) -> None:
    assert _still_hold(ranks) == clause


def test_both_holders_of_a_shard(tmp_path: Path) -> None:
    faults = (Fault("kill", 1, "before_commit", 2), Fault("kill", 3, "before_commit", 2))
    outcome = world.run(Case(faults=faults), tmp_path)
    assert outcome.code != 0
    assert "Every holder of shard 1 is lost (ranks 1, 3) at step 2" in outcome.logs


def test_every_rank_raises(tmp_path: Path) -> None:
    faults = tuple(Fault("raise", rank, "forward", 2) for rank in range(4))
    outcome = world.run(Case(faults=faults), tmp_path)
    assert outcome.code == 1
    assert outcome.logs.count("tests.support.job.Injected: at forward of step 2") >= 4
    assert "Every rank raised an exception in the same step" in outcome.logs
    assert "recovered" not in outcome.logs


def test_the_same_step_again_and_again(tmp_path: Path) -> None:
    faults = tuple(Fault("raise", 1, "forward", 2) for _ in range(5))
    outcome = world.run(Case(faults=faults), tmp_path)
    assert outcome.code == 1
    said = "The same step has failed 4 times (max_tries=3): the one after step 2, of which no shard is lost."
    assert outcome.logs.count(f"recovery failed at step 2: {said} rank 1: Injected: at forward of step 2") == 1
    assert "replica_zero: recovered" not in outcome.logs  # success is when a step is done


def test_a_fault_before_the_first_batch(tmp_path: Path) -> None:
    outcome = world.run(Case(faults=(Fault("kill", 2, "setup", -1),)), tmp_path)
    assert outcome.code == 128 + 9
    assert outcome.said == ["Rank 2 died (SIGKILL) outside of training, where a rank cannot be replaced."]
