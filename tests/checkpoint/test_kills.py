"""Killed at every call that changes the disk, and with no space left at every one: nothing wrong is ever loaded."""

import itertools
import os
import resource
import shutil
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

from lightning_replica.checkpoint.directory import CheckpointDirectory
from lightning_replica.errors import CheckpointError
from tests.checkpoint.disk import Unsynced, die_before, fill_up_before
from tests.checkpoint.small import directory_of, load, save
from tests.support.ranks import run_ranks
from tests.support.typed import on_disk

VALUES = [1.0, 2.0, 2.5]  # what the newest checkpoint holds, in turn


def story(directory: CheckpointDirectory) -> None:
    """A step is saved, the one before removed, then the same step is saved again."""
    directory.track(save(directory.path_of(2), 2, 2.0).name)
    directory.retain(1)
    directory.track(save(directory.path_of(2), 2, 2.5).name)


def in_child(work: Callable[[], object]) -> int:
    """Does it in a forked process; returns its exit code, negative for a signal."""
    if (pid := os.fork()) == 0:
        try:
            work()
        except CheckpointError as error:
            os.write(2, f"{error}\n".encode())
            os._exit(1)
        except BaseException as error:
            os.write(2, f"{error!r}\n".encode())
            os._exit(2)
        os._exit(0)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


def state(directory: CheckpointDirectory) -> float:
    """What is loaded; nothing may be found wrong, and the tracker must name something whole."""
    latest = directory.latest(verify=True)
    assert latest.problems == (), latest.problems
    assert directory.tracked is not None
    return load(latest.path)


def ever_after(root: str, trouble: Callable[[int], None], code: int) -> dict[str, Any]:
    """Tells the story with trouble at the first call, then at the second, and so on, until it comes to its end."""
    original = directory_of(Path(root) / "original", 1)
    found = []
    for number in itertools.count(1):
        directory = CheckpointDirectory(Path(root) / "copy")
        shutil.copytree(on_disk(original.path), on_disk(directory.path))

        def tells(number: int = number, directory: CheckpointDirectory = directory) -> None:
            trouble(number)
            story(directory)

        ended = in_child(tells)
        found.append(state(directory))
        left = [entry.name for entry in on_disk(directory.path).iterdir() if ".tmp" in entry.name]
        directory.prepare()
        assert state(directory) == found[-1], "tidying up"
        entries = {entry.name for entry in on_disk(directory.path).iterdir()}
        assert entries <= {"latest", "step_00000001", "step_00000002"}, entries
        if ended == 0:
            return {"found": found}
        assert ended == code, (number, ended)
        assert code < 0 or left in ([], ["latest.tmp"]), "a save that fails removes what it wrote"
        story(directory)
        assert state(directory) == VALUES[-1]
        shutil.rmtree(on_disk(directory.path))
    raise AssertionError


def killed(rank: int, store: Any, root: str) -> dict[str, Any]:
    return ever_after(root, die_before, -signal.SIGKILL)


def full(rank: int, store: Any, root: str) -> dict[str, Any]:
    return ever_after(root, fill_up_before, 1)


def check(result: dict[str, Any], calls: int) -> None:
    assert "found" in result, result.get("raised", result)
    assert result["found"] == sorted(result["found"]), "what was published stays"
    assert sorted(set(result["found"])) == VALUES
    assert len(result["found"]) >= calls


def test_killed_at_every_call_that_changes_the_disk(tmp_path: Path) -> None:
    check(run_ranks(1, killed, str(tmp_path), timeout_s=220)[0], 90)


def test_no_space_from_any_call_on(tmp_path: Path) -> None:
    check(run_ranks(1, full, str(tmp_path), timeout_s=220)[0], 40)


def limited(rank: int, store: Any, root: str) -> dict[str, Any]:
    """The real thing: the kernel refuses to make a file longer."""
    directory = directory_of(Path(root) / "run", 1)
    _, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    texts = []
    for limit in (0, 1000, 4000):
        reader, writer = os.pipe()

        def work(limit: int = limit, writer: int = writer) -> None:
            os.dup2(writer, 2)
            signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
            resource.setrlimit(resource.RLIMIT_FSIZE, (limit, hard))
            story(directory)

        assert in_child(work) == 1
        os.close(writer)
        with os.fdopen(reader) as stream:
            texts.append(stream.read())
        assert state(directory) == 1.0
        assert sorted(entry.name for entry in on_disk(directory.path).iterdir()) == ["latest", "step_00000001"]
    return {"texts": texts}


def test_a_file_that_may_not_grow(tmp_path: Path) -> None:
    (result,) = run_ranks(1, limited, str(tmp_path))
    assert "texts" in result, result.get("raised", result)
    staged = str(tmp_path / "run" / "step_00000002.tmp-")
    for text in result["texts"]:
        assert staged in text
        assert "could not be written" in text
        assert "File too large" in text
    assert "/plain.pt could not be" in result["texts"][1]


def synced(rank: int, store: Any, root: str) -> dict[str, Any]:
    directory = directory_of(Path(root), 1)
    unsynced = Unsynced()
    story(directory)
    return {"early": unsynced.early, "left": sorted(map(str, unsynced.dirty.values())), "renamed": unsynced.renamed}


def test_nothing_gets_its_name_before_it_is_on_the_disk(tmp_path: Path) -> None:
    (result,) = run_ranks(1, synced, str(tmp_path))
    assert result.pop("renamed", 0) == 5, result
    assert result == {"early": [], "left": []}
