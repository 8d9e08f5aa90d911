"""`CheckpointPublisher`: periodic checkpoints, the newest of which the tracker names."""

from pathlib import Path

import pytest

from lightning_replica import CheckpointPublisher, ConfigurationError, DyingGaspCheckpoint
from lightning_replica.checkpoint.directory import CheckpointDirectory
from tests.support import job, world
from tests.support.directories import names_in
from tests.support.job import Case, Fault
from tests.support.typed import on_disk


def publishes(case: Case, out: Path) -> None:
    job.run(case, out, (CheckpointPublisher(out / "kept", every_n_train_steps=2, keep_last=2),))


def cannot_write(case: Case, out: Path) -> None:
    job.run(case, out, (CheckpointPublisher("/proc/checkpoints"),))


@pytest.mark.parametrize("rank", [0, 1])
def test_the_newest_stay_and_a_run_goes_on_from_each(rank: int, pair: world.Outcome, tmp_path: Path) -> None:
    """A rank is killed with its part of one of them on the disk, nothing of which is published."""
    case = Case(devices=2, faults=(Fault("kill", rank, "save", 10),))
    world.run(case, tmp_path, target=publishes).assert_same(pair)
    assert (tmp_path / "fired0").exists()
    directory = CheckpointDirectory(tmp_path / "kept")
    entries = names_in(on_disk(directory.path))
    assert entries == ["latest", "step_00000010", "step_00000012"]
    assert directory.tracked == "step_00000012"
    assert not directory.latest(verify=True).problems
    again = Case(devices=2, load=str(directory.path_of(10)))
    world.run(again, tmp_path, target=publishes).assert_same(pair)


def test_a_directory_that_cannot_be_written_is_found_at_the_start(tmp_path: Path) -> None:
    outcome = world.run(Case(devices=2), tmp_path, target=cannot_write)
    assert outcome.code == 1
    assert outcome.logs.count("ConfigurationError: dirpath='/proc/checkpoints' cannot be written to") == 1
    assert not any(outcome.batches)


def test_values_that_make_no_sense(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match="every_n_train_steps=0 must be a whole number, 1 or more"):
        CheckpointPublisher(tmp_path, every_n_train_steps=0)
    with pytest.raises(ConfigurationError, match="keep_last=0 must be a whole number, 1 or more"):
        CheckpointPublisher(tmp_path, keep_last=0)
    with pytest.raises(ConfigurationError, match=r"grace_s=-1\.0 must be a number of seconds"):
        DyingGaspCheckpoint(tmp_path, grace_s=-1.0)
