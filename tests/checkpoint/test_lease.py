"""One run at a time writes to a directory: real processes, real locks."""

import errno
import fcntl
import json
import multiprocessing
import os
import shutil
import signal
import threading
from collections.abc import Iterator
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import pytest

from lightning_replica.checkpoint import lease
from lightning_replica.errors import CheckpointError, ConfigurationError

FORK = multiprocessing.get_context("fork")


class Rank:
    """A process that does what it is told, one call after the other."""

    def __init__(self) -> None:
        self._pipe, theirs = FORK.Pipe()
        self.process = FORK.Process(target=_serve, args=(theirs,))
        self.process.start()

    def call(self, name: str, *args: Any) -> Any:
        self._pipe.send((name, args))
        found = self._pipe.recv()
        if isinstance(found, Exception):
            raise found
        return found

    def kill(self) -> None:
        self.process.kill()
        self.process.join()


def _serve(pipe: Connection) -> None:
    while True:
        name, args = pipe.recv()
        try:
            pipe.send(getattr(lease, name)(*args))
        except Exception as error:
            pipe.send(error)


@pytest.fixture(autouse=True)
def none_is_held(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lease, "_held", {})


@pytest.fixture
def ranks() -> Iterator[list[Rank]]:
    made = [Rank() for _ in range(3)]
    yield made
    for each in made:
        each.kill()


def test_ranks_of_one_run_share_it(ranks: list[Rank], tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    token = ranks[0].call("take", tmp_path / "new" / "folder")
    assert ranks[0].call("share", tmp_path / "new" / "folder", token)
    assert ranks[1].call("share", tmp_path / "new" / "folder", token)
    assert ranks[0].call("take", tmp_path / "new" / "folder") == token  # in a second fit
    assert "without locks" not in capfd.readouterr().err


def test_another_run_is_refused_by_name(ranks: list[Rank], tmp_path: Path) -> None:
    ranks[0].call("take", tmp_path)
    with pytest.raises(ConfigurationError, match=rf"Another run, of process {ranks[0].process.pid} on .*, writes to"):
        ranks[1].call("take", tmp_path, 0.1)


def test_another_run_waits_while_any_rank_lives(
    ranks: list[Rank], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also when its rank 0 is dead: the others may be writing the last checkpoint."""
    token = ranks[0].call("take", tmp_path)
    ranks[1].call("share", tmp_path, token)
    ranks[0].kill()
    with pytest.raises(ConfigurationError, match="Another run"):
        ranks[2].call("take", tmp_path, 0.1)
    said: list[str] = []

    def say(text: str) -> None:
        said.append(text)
        ranks[1].kill()

    monkeypatch.setattr(lease, "say", say)
    assert lease.take(tmp_path) != token
    assert len(said) == 1
    assert f"which still writes to {tmp_path}, for up to 120 s." in said[0]


def test_children_of_a_rank_do_not_hold_it(ranks: list[Rank], tmp_path: Path) -> None:
    until, end = os.pipe()

    def work() -> None:
        os.close(end)
        os.read(until, 1)  # a worker that outlives its rank

    def run() -> None:
        lease.take(tmp_path)
        FORK.Process(target=work).start()
        os.kill(os.getpid(), signal.SIGKILL)

    rank = FORK.Process(target=run)
    rank.start()
    os.close(until)
    rank.join()
    assert rank.exitcode == -signal.SIGKILL
    assert ranks[0].call("take", tmp_path, 0.0)
    os.close(end)


@pytest.mark.parametrize("there", [None, "", "[]", "{}", "\xff", '{"token": "of another run"}'])
def test_a_rank_that_sees_another_directory(there: str | None, tmp_path: Path) -> None:
    if there is not None:
        (tmp_path / lease.LEASE).write_text(there)
    assert not lease.share(tmp_path, "a token", 0.0)


def test_where_there_are_no_locks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    calls: list[int] = []

    def fail(file: int, kind: int) -> None:
        calls.append(kind)
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(fcntl, "lockf", fail)
    token = lease.take(tmp_path, 0.0)
    assert f"{tmp_path} is on a file system without locks: nothing keeps a second run" in caplog.text
    lease._held.clear()  # as in another rank
    assert lease.share(tmp_path, token, 0.0)
    assert json.loads((tmp_path / lease.LEASE).read_text())["token"] == token
    assert len(calls) == 3


def test_a_server_of_locks_that_does_not_answer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    answers = threading.Event()
    asked: list[int] = []

    def hang(file: int, kind: int) -> None:
        asked.append(kind)
        answers.wait()

    monkeypatch.setattr(fcntl, "lockf", hang)
    monkeypatch.setattr(lease, "_ANSWERS_S", 0.1)
    assert lease.take(tmp_path)
    answers.set()
    assert asked


@pytest.mark.parametrize("mode", [0o755, 0o775, 0o777])
def test_whoever_may_write_to_the_directory_may_take_it(mode: int, tmp_path: Path) -> None:
    tmp_path.chmod(mode)
    lease.take(tmp_path)
    assert (tmp_path / lease.LEASE).stat().st_mode & 0o777 == (mode | 0o600) & 0o666


def test_a_directory_that_cannot_be_written_to(tmp_path: Path) -> None:
    (tmp_path / lease.LEASE).mkdir()
    with pytest.raises(CheckpointError, match=rf"{tmp_path}/{lease.LEASE} could not be written: Is a directory\."):
        lease.take(tmp_path)


def test_a_directory_that_is_removed_while_a_run_writes_there(ranks: list[Rank], tmp_path: Path) -> None:
    """The run that saves first has it then, and the other one is told."""
    directory, (one, two, _) = tmp_path / "checkpoints", ranks
    one.call("take", directory)
    shutil.rmtree(directory)
    one.call("keep", directory)
    with pytest.raises(ConfigurationError, match=f"Another run, of process {one.process.pid} "):
        two.call("take", directory, 0.0)
    shutil.rmtree(directory)
    two.call("take", directory, 0.0)
    for _ in range(2):
        with pytest.raises(ConfigurationError, match=f"Another run, of process {two.process.pid} "):
            one.call("keep", directory)


def test_a_file_system_without_modes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise PermissionError("Operation not permitted")

    monkeypatch.setattr(os, "fchmod", refuse)
    assert lease.take(tmp_path)
