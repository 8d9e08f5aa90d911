"""What was done since a snapshot is known where it is done again, by the same process or by its replacement."""

from typing import Any

import pytest
import torch.distributed as dist
from lightning.pytorch.callbacks import ModelCheckpoint

from lightning_replica.state.checkpoint_files import CheckpointFiles
from lightning_replica.state.written import Written


def test_what_is_done_again_is_there_once() -> None:
    since = Written(dist.HashStore(), "things", is_replacement=False)
    since.taken("tail", 1)
    since.add("a")
    since.add("a")
    since.restored("tail", 1)
    for left in (True, True, False):
        assert since.is_there("a") == left
        since.add("a")
    assert not since.is_there("b")


def test_what_came_before_the_snapshot_is_not_there() -> None:
    since = Written(dist.HashStore(), "things", is_replacement=False)
    since.taken("batch", 0)
    since.add("a")
    since.taken("tail", 1)
    since.restored("tail", 1)
    assert not since.is_there("a")


class Trainer:
    """All of a trainer that asking for a file takes."""

    class strategy:
        @staticmethod
        def broadcast(value: bool) -> bool:
            return value


@pytest.mark.parametrize("replaced", [False, True])
def test_a_file_that_was_written_since_is_not_there(replaced: bool, tmp_path: Any) -> None:
    store, callback, trainer = dist.HashStore(), ModelCheckpoint(tmp_path), Trainer()
    before, since = str(tmp_path / "before.ckpt"), str(tmp_path / "since.ckpt")
    files = CheckpointFiles(store, [callback], is_replacement=False, writes=True)
    for path, taken in ((before, 1), (since, 2)):
        files.taken("batch", taken - 1)
        files.taken("tail", taken)
        files.is_written(path)
        (tmp_path / path).touch()
        assert callback.file_exists(path, trainer)  # type: ignore[arg-type]
    if replaced:
        files.release()
        files = CheckpointFiles(store, [callback], is_replacement=True, writes=True)
    files.restored("tail", 2)
    assert callback.file_exists(before, trainer)  # type: ignore[arg-type]
    assert not callback.file_exists(since, trainer)  # type: ignore[arg-type]
    files.is_written(since)
    assert callback.file_exists(since, trainer)  # type: ignore[arg-type]
    files.release()
    assert "file_exists" not in vars(callback)
