"""A run that went on from a last checkpoint and ends again before it has made a step: nothing is lost."""

import shutil
from collections.abc import Iterable
from itertools import product
from pathlib import Path
from typing import Any

import pytest

from lightning_replica.checkpoint.directory import CheckpointDirectory
from lightning_replica.exit_codes import GASP_WRITTEN, NO_PROGRESS, NOTHING_SAVED
from tests.support import world
from tests.support.job import Case, Fault
from tests.support.typed import on_disk

# Where the first run ended: before the batches of the third step, or in the tail of that step.
PLACES = {"batch": Fault("kill", 1, "reduction", 2), "tail": Fault("kill", 1, "after_commit", 2)}


@pytest.fixture(scope="module")
def ended(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """What runs have left that were ended once."""
    left = {}
    for place, fault in PLACES.items():
        left[place] = tmp_path_factory.mktemp(place)
        assert world.run(Case((fault,), devices=2, gasp=True), left[place], max_restarts=0).code == GASP_WRITTEN
    return left


def again(out: Path, place: str, *faults: Fault) -> world.Outcome:
    """Goes on from the newest checkpoint, into ``faults``."""
    case = Case((PLACES[place], *faults), devices=2, gasp=True, load="last")
    return world.run(case, out, max_restarts=0)


def newest(out: Path) -> tuple[Path, int]:
    """The newest checkpoint, and when it was written."""
    latest = CheckpointDirectory(out / "gasp").latest(verify=True)
    assert latest.problems == ()
    assert latest.manifest is not None
    assert CheckpointDirectory(out / "gasp").tracked == on_disk(latest.path).name
    return on_disk(latest.path), latest.manifest.saved_ns


# Points of the second run. The third step's tail, done again, is before its first step too.
ENDS = {
    "killed before its first batch": ("batch", "kill", "batch_start"),
    "killed in its first batch": ("batch", "kill", "forward"),
    "killed before its first commit": ("batch", "kill", "before_commit"),
    "all raise in its first batch": ("batch", "exception", "backward"),
    "killed before the tail is done again": ("tail", "kill", "scheduler"),
    "killed in the tail": ("tail", "kill", "train_batch_end"),
    "all raise in the tail": ("tail", "exception", "train_batch_end"),
}


def sampled(cells: Iterable[Any], *chosen: Any) -> list[Any]:
    """All cells; all but ``chosen`` behind the marker."""
    return [pytest.param(cell, marks=() if cell in chosen else pytest.mark.combinations) for cell in cells]


@pytest.mark.parametrize("end", sampled(ENDS, "killed before its first batch", "all raise in the tail"))
def test_a_new_one_is_right(end: str, ended: dict[str, Path], pair: world.Outcome, tmp_path: Path) -> None:
    """Written in place of the former, of the same step; twice."""
    place, kind, point = ENDS[end]
    out = shutil.copytree(ended[place], tmp_path / "run")
    former = newest(out)
    ranks = (0, 1) if kind == "exception" else (0,)
    faults = [Fault(kind, rank, point, None) for rank in ranks]
    for time in (1, 2):
        outcome = again(out, place, *faults)
        assert outcome.code == (GASP_WRITTEN if time == 1 else NO_PROGRESS), outcome.logs  # the third at one step
        path, saved_ns = newest(out)
        assert path == former[0]
        assert saved_ns > former[1]
        former = path, saved_ns
        if time == 1:
            for number in range(len(ranks)):
                (out / f"fired{1 + number}").unlink()
    again(out, place, *faults).assert_same(pair)


CODES = {"kill": 137, "exception": 1}


@pytest.mark.parametrize("end", sampled(product(PLACES, CODES), ("tail", "kill"), ("batch", "exception")), ids=" ".join)
def test_the_former_stays(end: tuple[str, str], ended: dict[str, Path], pair: world.Outcome, tmp_path: Path) -> None:
    """Ended before its first batch, when the former is loaded, and there is nothing to save yet."""
    place, kind = end
    out = shutil.copytree(ended[place], tmp_path / "run")
    former = newest(out)
    outcome = again(out, place, Fault(kind, 0, "train_start", None))
    assert outcome.code == CODES[kind], outcome.logs
    assert newest(out) == former
    again(out, place, Fault(kind, 0, "train_start", None)).assert_same(pair)


@pytest.mark.parametrize("place", sampled(PLACES, "tail"))
def test_told_at_once(place: str, ended: dict[str, Path], pair: world.Outcome, tmp_path: Path) -> None:
    """It makes the step that was under way, as ever, and saves that."""
    out = shutil.copytree(ended[place], tmp_path / "run")
    former = newest(out)
    told = Fault("sigterm", 0, "batch_start", None)
    assert again(out, place, told).code == GASP_WRITTEN
    assert newest(out)[0].name > former[0].name
    again(out, place, told).assert_same(pair)


def test_lost_while_the_former_is_set_aside(ended: dict[str, Path], pair: world.Outcome, tmp_path: Path) -> None:
    """Whoever publishes the new one is killed between two renames, and nobody is left."""
    out = shutil.copytree(ended["batch"], tmp_path / "run")
    path, saved_ns = newest(out)
    faults = Fault("kill", 1, "batch_start", None), Fault("kill", 0, "publish", None)
    outcome = again(out, "batch", *faults)
    assert outcome.code == NOTHING_SAVED, outcome.logs
    left = CheckpointDirectory(out / "gasp").latest(verify=True)
    assert left.manifest is not None
    assert (left.path, left.manifest.saved_ns) == (path.with_name(path.name + ".old"), saved_ns)
    again(out, "batch", *faults).assert_same(pair)


def alone(out: Path, *faults: Fault) -> world.Outcome:
    """Goes on with one rank in place of two."""
    case = Case((PLACES["tail"], *faults), replicas=1, devices=1, gasp=True, load="last")
    return world.run(case, out, max_restarts=0)


def test_in_the_tail_and_then_with_fewer_ranks(ended: dict[str, Path], tmp_path: Path) -> None:
    """Schedulers step once for the update whose tail was still to come, whoever ended before it had."""
    once, before, behind = (shutil.copytree(ended["tail"], tmp_path / name) for name in ("once", "before", "behind"))
    expected = alone(once)
    assert again(before, "tail", Fault("kill", 0, "scheduler", None)).code == GASP_WRITTEN
    alone(before).assert_same(expected)
    assert alone(behind, Fault("exception", 0, "batch_start", None)).code == GASP_WRITTEN
    alone(behind, Fault("exception", 0, "batch_start", None)).assert_same(expected)
