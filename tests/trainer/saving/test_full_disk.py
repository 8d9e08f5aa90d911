"""No space for the last checkpoint: an error that names the file, and the checkpoint before is as it was."""

import os
import re
import resource
import subprocess
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import pytest

from lightning_replica import CheckpointPublisher
from lightning_replica.checkpoint.directory import CheckpointDirectory
from lightning_replica.checkpoint.storage import FAILURES, TRACKER
from lightning_replica.core.points import listen
from lightning_replica.exit_codes import GASP_WRITTEN, NOTHING_SAVED
from tests.support import job, world
from tests.support.directories import names_in
from tests.support.job import Case, Fault
from tests.support.typed import on_disk

FILLER = "filler"


@dataclass
class Full(Case):
    """From ``point`` on, once there is a checkpoint, ``rank`` can write no file of more than ``limit_bytes``.

    None is a full disk in place of the limit.
    """

    devices: int = 2
    faults: tuple[Fault, ...] = (Fault("sigterm", 1, "batch_start", 2),)
    gasp: bool = True
    load: str = "last"
    rank: int = 0
    limit_bytes: int | None = 1000
    point: str = "gasp_write"
    must_save: bool = False


def fill(directory: Path) -> None:
    """Leaves four pages of the disk."""
    with (directory / FILLER).open("wb", buffering=0) as file:
        with suppress(OSError):
            while True:
                file.write(bytes(4096))
        file.truncate(file.tell() - 4 * 4096)


def trains(case: Full, out: Path) -> None:
    def limit(point: str) -> None:
        if (point, int(os.environ["LOCAL_RANK"])) != (case.point, case.rank) or not (out / "gasp" / TRACKER).is_file():
            return
        if case.limit_bytes is None:
            fill(out / "gasp")
        else:
            _, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
            resource.setrlimit(resource.RLIMIT_FSIZE, (case.limit_bytes, hard))

    listen(limit)
    job.run(case, out, (CheckpointPublisher(out / "gasp", every_n_train_steps=2, must_save=case.must_save),))


def check(case: Full, out: Path, rank: int, file: str, reason: str, pair: world.Outcome) -> None:
    """The periodic checkpoint of step 2 is all that is there; with space again, a run goes on from it."""
    ended = world.run(case, out, max_restarts=0, target=trains)
    assert ended.code == NOTHING_SAVED, ended.logs
    staged = re.escape(f"the last checkpoint could not be written: rank {rank}: {out}/gasp/step_0000000")
    named = rf"{staged}[34]\.tmp-\w{{8}}/{re.escape(file)} could not be written: {reason}\."
    assert re.search(named, ended.logs), ended.logs
    directory = CheckpointDirectory(out / "gasp")
    (on_disk(directory.path) / FILLER).unlink(missing_ok=True)
    failed = {FAILURES} if case.must_save else set()  # else it was told to end
    assert set(names_in(on_disk(directory.path))) == {TRACKER, "step_00000002", *failed}
    assert directory.tracked == "step_00000002"
    assert directory.latest(verify=True).problems == ()
    world.run(Full(()), out, max_restarts=0).assert_same(pair)


CASES = {
    "__1_0.distcp": Full(rank=1),
    ".metadata": Full(limit_bytes=0, point="save"),
}


@pytest.mark.parametrize("file", CASES)
def test_a_file_may_not_grow(file: str, pair: world.Outcome, tmp_path: Path) -> None:
    case = CASES[file]
    check(case, tmp_path, case.rank, file, "File too large", pair)


def test_a_periodic_save_that_must_not_fail(pair: world.Outcome, tmp_path: Path) -> None:
    """Every rank raises, and the last checkpoint cannot be written for the same reason."""
    case = Full((), point="batch_end", must_save=True)
    check(case, tmp_path, 0, "plain.pt", "File too large", pair)


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A directory whose ``gasp`` is a disk of one MiB."""
    disk = tmp_path / "gasp"
    disk.mkdir()
    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", disk], capture_output=True, text=True)
    if mounted.returncode != 0:
        pytest.skip(f"needs to mount a disk: {mounted.stderr}")
    yield tmp_path
    subprocess.run(["umount", disk], check=True)


def test_a_full_disk(small_disk: Path, pair: world.Outcome) -> None:
    check(Full(limit_bytes=None), small_disk, 0, "plain.pt", "No space left on device", pair)


def test_the_tracker_cannot_be_written(pair: world.Outcome, tmp_path: Path) -> None:
    """The last checkpoint is there, so the run is to be started again; the tracker names the one before."""
    ended = world.run(Full(limit_bytes=0, point="track"), tmp_path, max_restarts=0, target=trains)
    assert ended.code == GASP_WRITTEN, ended.logs
    directory = CheckpointDirectory(tmp_path / "gasp")
    assert directory.tracked == "step_00000002"
    latest = directory.latest(verify=True)
    assert latest.problems == ()
    assert latest.path == directory.path_of(3)
    world.run(Full(()), tmp_path, max_restarts=0).assert_same(pair)
