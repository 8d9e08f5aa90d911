"""Results of training loops: they take room on the disk, once a script trains a second time."""

from pathlib import Path
from typing import NoReturn

import pytest
import torch
from torch import nn

from lightning_replica.control.blobs import Blobs
from lightning_replica.errors import RecoveryError
from lightning_replica.state.loop_results import LoopResults
from lightning_replica.state.structure import Original, Outline


def kept(directory: Path, rank: int, module: nn.Module) -> LoopResults:
    results = LoopResults(Blobs(directory), rank, [0, 1])
    outline = Outline.of(module, Original(module))
    results.keep(1, module, lambda: (outline, b"replicated", b"private of %d" % rank))
    return results


def test_ranks_read_what_they_have_written_together(tmp_path: Path) -> None:
    module, other = nn.Linear(3, 5), nn.Linear(3, 5)
    for rank in (0, 1):
        assert kept(tmp_path, rank, module).write() == ""
    assert kept(tmp_path, 1, other).read(1, other) == (b"replicated", b"private of 1")
    assert torch.equal(other.weight, module.weight)


def test_one_loop_writes_nothing(tmp_path: Path) -> None:
    kept(tmp_path, 0, nn.Linear(3, 5))
    assert list(tmp_path.iterdir()) == []


def test_a_result_that_cannot_be_sent(tmp_path: Path) -> None:
    """The process that replaces a rank says why."""

    def take() -> NoReturn:
        raise RecoveryError("the state of 'Mine' cannot be sent")

    for rank in (0, 1):
        results = LoopResults(Blobs(tmp_path), rank, [0, 1])
        results.keep(1, nn.Linear(3, 5), take)
        assert results.write() == "the state of 'Mine' cannot be sent"
    with pytest.raises(RecoveryError, match="the state of 'Mine' cannot be sent"):
        results.read(1, nn.Linear(3, 5))


@pytest.mark.parametrize("size", [1, 1000])
def test_a_disk_without_room(tmp_path: Path, size: int) -> None:
    """torch raises an error of its own, which does not say what is wrong."""
    (tmp_path / "loop-1-rank-0.0").symlink_to("/dev/full")
    problem = kept(tmp_path, 0, nn.Linear(size, size)).write()
    assert "could not be written: [Errno 28] No space left on device" in problem
    assert "TMPDIR" in problem
    assert list(tmp_path.iterdir()) == []
    with pytest.raises(RecoveryError, match="No such file"):
        kept(tmp_path, 0, nn.Linear(size, size)).read(1, nn.Linear(size, size))


def test_a_directory_that_is_gone(tmp_path: Path) -> None:
    assert "No such file" in kept(tmp_path / "gone", 0, nn.Linear(3, 5)).write()
