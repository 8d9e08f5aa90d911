"""When recovery cannot help, the run ends: soon, with one clear error, never by hanging."""

import functools
import os
import re
import sys
from pathlib import Path
from typing import Any

import pytest
from lightning.pytorch.callbacks import ModelCheckpoint, OnExceptionCheckpoint

from lightning_replica.exit_codes import GAVE_UP
from lightning_replica.recovery.recovery import _still_hold
from tests.support import job, world
from tests.support.job import Case, Fault


@pytest.mark.parametrize("rank", [0, 3])
def test_no_replacement_can_be_had(rank: int, tmp_path: Path) -> None:
    outcome = world.run(Case(faults=(Fault("kill", rank, "backward", 2),)), tmp_path, max_restarts=0)
    assert outcome.code == GAVE_UP
    assert outcome.said == [f"Rank {rank} died (SIGKILL), and no replacement is left: 0 of max_restarts=0 are used."]
    left = {
        0: "Rank 0 held shard 0 at step 2; rank 2 still holds it.",
        3: "Rank 3 held shard 1 at step 2; rank 1 still holds it.",
    }
    assert outcome.logs.count(left[rank]) == 1  # one survivor says so for all
    assert "Traceback" not in outcome.logs, outcome.logs


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
    faults = tuple(Fault("exception", rank, "forward", 2) for rank in range(4))
    outcome = world.run(Case(faults=faults), tmp_path)
    assert outcome.code == 1
    assert outcome.logs.count("Traceback") == 1, outcome.logs
    assert len(re.findall(r"^\[rank \d\] tests.support.job.Injected: at forward of step 2$", outcome.logs, re.M)) == 1
    assert "Every rank raised an exception in the same step" in outcome.logs
    assert "recovered" not in outcome.logs


class Keeps(OnExceptionCheckpoint):
    """Lightning's, whose file would go with the trainer."""

    def teardown(self, *_: Any, **__: Any) -> None:
        pass


def saving(case: Case, out: Path) -> None:
    job.run(case, out, (Keeps(out), ModelCheckpoint(out / "best", save_on_exception=True)))


@pytest.mark.parametrize("devices", [1, 2])
def test_callbacks_that_save_on_an_exception(devices: int, tmp_path: Path) -> None:
    """They must not hide it: with shards in several ranks they cannot, and say so."""
    faults = tuple(Fault("exception", rank, "forward", 2) for rank in range(devices))
    outcome = world.run(Case(faults, devices=devices, replicas=devices), tmp_path, target=saving)
    assert outcome.code == 1
    assert outcome.logs.count("Traceback") == 1, outcome.logs
    assert len(re.findall(r"^\[rank \d\] tests.support.job.Injected: at forward of step 2$", outcome.logs, re.M)) == 1
    assert (tmp_path / "on_exception.ckpt").exists() == (devices == 1)
    assert outcome.logs.count("on_exception.ckpt is not written: the run has failed") == (devices > 1)


def test_the_same_step_again_and_again(tmp_path: Path) -> None:
    faults = tuple(Fault("exception", 1, "forward", 2) for _ in range(5))
    outcome = world.run(Case(faults=faults), tmp_path)
    assert outcome.code == 1
    said = "The same step has failed 4 times (max_tries=3): the one after step 2. No shard of step 2 is lost."
    assert outcome.logs.count(f"recovery failed at step 2: {said} rank 1: Injected: at forward of step 2") == 1
    assert "replica_zero: recovered" not in outcome.logs  # success is when a step is done
    assert outcome.logs.count("Traceback") == 1, outcome.logs


def test_a_process_that_ends_twice_in_the_same_place(tmp_path: Path) -> None:
    """Nobody trains on: not this batch, and not without it. Two more processes would end there too."""
    faults = (Fault("exit", 1, "forward", 2), Fault("exit", 1, "forward", 2))
    outcome = world.run(Case(faults, devices=2), tmp_path)
    assert outcome.code == 3, outcome.logs
    assert outcome.said == [
        "Rank 1 ended with exit code 3; a new process takes its place (1 of 3).",
        "Rank 1 ended with exit code 3, twice in forward of step 2: another process would end there too.",
    ]
    assert "Traceback" not in outcome.logs, outcome.logs


def calls_exit(case: Case, out: Path) -> None:
    original = job.Model.training_step

    def training_step(self: job.Model, batch: Any, batch_idx: int) -> Any:
        if (self.global_rank, self.trainer.global_step) == (1, 3):
            sys.exit(4)
        return original(self, batch, batch_idx)

    job.Model.training_step = training_step  # type: ignore[method-assign]
    job.run(case, out)


def test_a_script_that_calls_exit(tmp_path: Path) -> None:
    outcome = world.run(Case(devices=2), tmp_path, target=calls_exit)
    assert outcome.code == 4, outcome.logs
    said = rf"Rank 1 ended with SystemExit: 4 \({re.escape(__file__)}:\d+\)"
    assert len(outcome.said) == 2, outcome.said
    assert re.fullmatch(rf"{said}; a new process takes its place \(1 of 3\)\.", outcome.said[0]), outcome.said
    again = rf"{said}, twice in forward of step 3: another process would end there too\."
    assert re.fullmatch(again, outcome.said[1]), outcome.said
    assert "Traceback" not in outcome.logs, outcome.logs


def leaves(case: Case, out: Path, ranks: tuple[int, ...] = (0, 1)) -> None:
    original = job.Model.on_train_batch_end

    def on_train_batch_end(self: job.Model, *args: Any) -> None:
        original(self, *args)
        if self.trainer.global_step == 3 and self.global_rank in ranks:
            sys.exit()

    job.Model.on_train_batch_end = on_train_batch_end  # type: ignore[method-assign, assignment]
    job.run(case, out)


def test_a_script_that_ends_in_training(tmp_path: Path) -> None:
    """On all ranks, and without an error."""
    outcome = world.run(Case(devices=2), tmp_path, target=leaves)
    assert outcome.code == 0, outcome.logs
    assert outcome.said == []
    assert "Traceback" not in outcome.logs, outcome.logs


def test_one_rank_that_ends_in_training(tmp_path: Path) -> None:
    """The others cannot go on without it, and say why."""
    outcome = world.run(Case(devices=2), tmp_path, target=functools.partial(leaves, ranks=(0,)))
    assert outcome.code == 1, outcome.logs
    said = rf"recovery failed at step 3: Rank 0 has called `sys\.exit\(\)` in training \({re.escape(__file__)}:\d+\)"
    assert re.search(said, outcome.logs), outcome.logs


def fails_to_come_back(case: Case, out: Path) -> None:
    if os.environ["LIGHTNING_REPLICA_GENERATION"] != "0":
        raise ImportError("a library is gone")
    job.run(case, out)


def test_replacements_that_fail_in_their_set_up(tmp_path: Path) -> None:
    outcome = world.run(Case((Fault("kill", 1, "forward", 2),), devices=2), tmp_path, 9, fails_to_come_back)
    assert outcome.code == 1, outcome.logs
    assert len(outcome.said) == 3, outcome.said
    said = "Rank 1 ended with exit code 1"
    assert outcome.said[1] == f"{said}; a new process takes its place (2 of 9)."
    where = "at the start, before its first batch"
    assert outcome.said[2] == f"{said}, twice {where}: another process would end there too."


def test_a_fault_before_the_first_batch(tmp_path: Path) -> None:
    outcome = world.run(Case(faults=(Fault("kill", 2, "setup", -1),)), tmp_path)
    assert outcome.code == 128 + 9
    assert outcome.said == ["Rank 2 died (SIGKILL) before its first batch, where a rank cannot be replaced."]
