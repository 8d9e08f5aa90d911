"""Runs that fail again and again at one step: the third says that it is not worth starting another."""

import json
from pathlib import Path
from typing import Any

import pytest
from lightning.pytorch.callbacks import Callback

from lightning_replica import CheckpointPublisher
from lightning_replica.checkpoint import store
from lightning_replica.checkpoint.directory import CheckpointDirectory
from lightning_replica.checkpoint.failures import Failures
from lightning_replica.checkpoint.location import Url
from lightning_replica.exit_codes import GASP_WRITTEN, GAVE_UP, NO_PROGRESS
from tests.launch.test_external import slurm
from tests.launch.test_external import start as start_ranks
from tests.support import job, world
from tests.support.directories import names_in
from tests.support.job import Case, Fault
from tests.support.typed import on_disk

POISONED = Case(devices=2, gasp=True, load="last")


class Poison(Callback):
    """A batch that no rank can be trained on, in the step that ``poison`` names; none once that file is gone."""

    def __init__(self, out: Path) -> None:
        self.file = out / "poison"

    def on_train_batch_start(self, trainer: Any, *_: Any) -> None:
        if self.file.exists() and trainer.global_step == int(self.file.read_text()):
            raise RuntimeError("poisoned")


def poisoned(case: Case, out: Path) -> None:
    job.run(case, out, (Poison(out),))


def poisoned_without_a_gasp(case: Case, out: Path) -> None:
    job.run(case, out, (Poison(out), CheckpointPublisher(out / "gasp", every_n_train_steps=2)))


def failed_before(out: Path, step: int, times: int) -> None:
    (out / "gasp").mkdir()
    for _ in range(times):
        Failures(out / "gasp").add(step, "")


def failures(out: Path) -> tuple[int, int] | None:
    file = out / "gasp" / "failures.json"
    read = json.loads(file.read_text()) if file.exists() else None
    return None if read is None else (read["step"], read["failures"])


def test_the_third_at_one_step_ends_the_loop(pair: world.Outcome, tmp_path: Path) -> None:
    """A scheduler that starts the same command again for 75 would do so for ever."""
    (tmp_path / "poison").write_text("3")
    for count, code in enumerate([GASP_WRITTEN, GASP_WRITTEN, NO_PROGRESS, NO_PROGRESS], start=1):
        ended = world.run(POISONED, tmp_path, max_restarts=0, target=poisoned)
        assert ended.code == code, f"{ended.said}\n{ended.logs}"
        assert failures(tmp_path) == (3, count)
        assert len([line for line in ended.said if "Start it again" in line]) == (code == GASP_WRITTEN)
    assert any(line.startswith("4 runs in a row have failed at step 3, so another would too") for line in ended.said)
    (tmp_path / "poison").write_text("4")  # a run that comes further counts anew
    assert world.run(POISONED, tmp_path, max_restarts=0, target=poisoned).code == GASP_WRITTEN
    assert failures(tmp_path) == (4, 1)
    (tmp_path / "poison").unlink()
    world.run(POISONED, tmp_path, max_restarts=0, target=poisoned).assert_same(pair)
    assert failures(tmp_path) is None


@pytest.mark.parametrize("moment", ["before the first step is done", "in a later step"])
def test_pre_emption_is_no_failure(moment: str, tmp_path: Path) -> None:
    """Though it ends the run at the very step at which two have failed."""
    before = (0, 2) if "first" in moment else (3, 2)
    failed_before(tmp_path, *before)
    faults = (
        # Nobody comes to the end of the first step; half of the grace is waited for that.
        (Fault("tell 15", 0, "backward", 0), Fault("sleep", 1, "backward", 0))
        if "first" in moment
        else (Fault("sigterm", 1, "backward", 2),)
    )
    case = Case(faults, devices=2, gasp=True, grace_s=18.0 if "first" in moment else 25.0)
    ended = world.run(case, tmp_path, max_restarts=0)
    assert ended.code == GASP_WRITTEN, f"{ended.said}\n{ended.logs}"
    assert on_disk(CheckpointDirectory(tmp_path / "gasp").path_of(before[0])).exists()
    assert failures(tmp_path) == before


def test_without_a_last_checkpoint(tmp_path: Path) -> None:
    """A rank dies at the same step each time, and an earlier checkpoint is all that there is."""
    case = Case((Fault("kill", 1, "backward", 3),), devices=2, load="last")
    for code in (GAVE_UP, GAVE_UP, NO_PROGRESS):
        ended = world.run(case, tmp_path, max_restarts=0, target=poisoned_without_a_gasp)
        assert ended.code == code, f"{ended.said}\n{ended.logs}"
        (tmp_path / "fired0").unlink()
    assert failures(tmp_path) == (3, 3)


def test_under_another_launcher(tmp_path: Path) -> None:
    """Ranks count, as there is nobody else; all end with the same code."""
    (tmp_path / "poison").write_text("0")
    failed_before(tmp_path, 0, 1)
    for code in (GASP_WRITTEN, NO_PROGRESS):
        ranks = start_ranks(slurm, tmp_path, poisoned, POISONED, tmp_path)
        assert [rank.wait() for rank in ranks] == [code] * 2, (tmp_path / "log0").read_text()
    assert failures(tmp_path) == (0, 3)


def counts(place: str) -> None:
    failures = Failures(place)
    assert [failures.add(step, "why") for step in (5, 5, 6, 5, 5, 5)] == [1, 2, 1, 1, 2, 3]
    failures.forget_before(5)
    assert failures.add(5, "why") == 4
    failures.forget_before(6)
    assert failures.add(5, "why") == 1
    failures.forget()
    failures.forget()
    assert failures.add(5, "why") == 1


def test_the_file(tmp_path: Path) -> None:
    counts(str(tmp_path))
    assert names_in(tmp_path) == ["failures.json"]
    for damaged in ("", "[]", "{}", '{"step": "5", "failures": 2}', '{"step": 5, "failures": -2}', "[" * 10_000, "\0"):
        (tmp_path / "failures.json").write_text(damaged)
        assert Failures(tmp_path).add(5, "why") == 1
    CheckpointDirectory(tmp_path).prepare()
    assert names_in(tmp_path) == ["failures.json"]


def test_the_object_in_a_store(bucket: str) -> None:
    counts(bucket)
    assert set(store.objects(Url(bucket))) == {"failures.json"}
