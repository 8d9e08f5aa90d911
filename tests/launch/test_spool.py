"""The supervisor's directory goes with it, or with the next one."""

import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import pytest

from lightning_replica.checkpoint.location import Url
from lightning_replica.checkpoint.which_storage import storage_of
from lightning_replica.launch import spool as module
from lightning_replica.launch.spool import Spool


@pytest.fixture(autouse=True)
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    return tmp_path


def make_old(path: Path) -> None:
    os.utime(path, (time.time() - 3600,) * 2)


def test_it_goes_when_it_is_closed() -> None:
    spool = Spool()
    (spool.path / "large").write_bytes(b"x")
    spool.close()
    assert not spool.path.exists()


def test_one_in_use_stays() -> None:
    used = Spool()
    make_old(used.path)
    Spool().close()
    assert used.path.exists()
    used.close()


@pytest.mark.parametrize("old", [True, False])
def test_what_a_killed_process_leaves_goes_with_the_next(old: bool, place: Path) -> None:
    """But not what is so young that its owner may not have locked it yet."""
    code = (
        f"import runpy; spool = runpy.run_path({module.__file__!r})['Spool'](); print(spool.path, flush=True); input()"
    )
    environment = {**os.environ, "TMPDIR": str(place)}
    with subprocess.Popen(
        [sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment
    ) as killed:
        assert killed.stdout is not None
        left = Path(killed.stdout.readline().strip())
        make_old(left)
        Spool().close()
        assert left.is_dir()
        killed.kill()
    (left / "large").write_bytes(b"x")
    if old:
        make_old(left)
    Spool().close()
    assert left.exists() != old


def test_what_others_keep_in_the_same_place_stays() -> None:
    """Without a supervisor, a rank's files lie there until they are uploaded."""
    with storage_of(Url("memory://runs/step")).destination() as upload:
        upload.begin(first=False)
        make_old(upload.directory)
        Spool().close()
        assert upload.directory.is_dir()
