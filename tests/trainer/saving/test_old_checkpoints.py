"""A run resumes from checkpoints that version 09b1d78 has written: formats on disk stay."""

import tarfile
from pathlib import Path

import pytest

from tests.support import world
from tests.support.job import Case

# `job.run(Case(devices=2), ...)` after seven steps: `full.ckpt` by `trainer.save_checkpoint`, the directory by a
# `CheckpointPublisher`.
ARCHIVE = Path(__file__).with_name("written_by_09b1d78.tar.xz")


@pytest.fixture(scope="module")
def old(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("old")
    with tarfile.open(ARCHIVE) as archive:
        archive.extractall(folder, filter="data")
    return folder


def test_either_form_leads_to_the_same_end(old: Path, tmp_path: Path) -> None:
    """Weights are not compared with those of the run that wrote them: another processor may round otherwise."""
    untouched = world.run(Case(devices=2), tmp_path / "untouched")
    full = world.run(Case(devices=2, load=str(old / "full.ckpt")), tmp_path / "full")
    sharded = world.run(Case(devices=2, load=str(old / "kept" / "step_00000007")), tmp_path / "sharded")
    assert (full.code, sharded.code) == (0, 0), full.logs + sharded.logs
    assert full.ranks == sharded.ranks
    for rank in range(2):
        seen, whole = full.batches[rank], untouched.batches[rank]
        assert seen == sharded.batches[rank]
        assert list(seen.items()) == list(whole.items())[-len(seen) :]  # the very batches that were to come
        assert len(seen) == 10
        for part in ("groups", "schedulers", "progress", "random"):
            assert full.ranks[rank][part] == untouched.ranks[rank][part]
