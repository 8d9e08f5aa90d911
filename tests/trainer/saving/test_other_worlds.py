"""A run that goes on with another number of ranks."""

from pathlib import Path

from lightning_replica.checkpoint.directory import CheckpointDirectory
from lightning_replica.exit_codes import GASP_WRITTEN
from tests.support import world
from tests.support.job import Case, Fault


def halved(point: str, step: int, out: Path) -> world.Outcome:
    """Four ranks until one is lost, then two."""
    ended = world.run(Case(faults=(Fault("kill", 1, point, step),), gasp=True), out / "four", max_restarts=0)
    assert ended.code == GASP_WRITTEN, ended.logs
    left = CheckpointDirectory(out / "four" / "gasp").latest()
    assert left.manifest is not None
    assert left.manifest.step == 2
    return world.run(Case(gasp=True, load=str(left.path), devices=2), out / "two", max_restarts=0)


def test_half_as_many_ranks(tmp_path: Path) -> None:
    """From the start of the third window as from the tail of the second step: no sample twice, none left out."""
    window, tail = halved("reduction", 2, tmp_path / "window"), halved("after_commit", 1, tmp_path / "tail")
    assert window.code == 0, window.logs
    assert [batch for batch in window.batches[0] if batch.startswith("0 ")] == ["0 8", "0 9", "0 10", "0 11"]
    assert window.ranks[0]["progress"][0] == 2 + 2 + 6
    tail.assert_same(window)
