"""A run that cannot go on, and the one that goes on from what it left: the untouched run, to the last bit."""

import itertools
import os
import signal
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest
from lightning.pytorch.callbacks import Callback

from lightning_replica.checkpoint.directory import CheckpointDirectory
from lightning_replica.checkpoint.publish import temporary_of
from lightning_replica.checkpoint.storage import FAILURES
from lightning_replica.exit_codes import GASP_WRITTEN, NOTHING_SAVED
from tests.support import job, world
from tests.support.job import Case, Fault


@pytest.fixture(scope="module")
def untouched(tmp_path_factory: pytest.TempPathFactory) -> world.Outcome:
    return world.run(Case(), tmp_path_factory.mktemp("untouched"))


def resumed(case: Case, out: Path) -> world.Outcome:
    """Runs ``case`` to its end, and goes on from what it has left."""
    ended = world.run(case, out, max_restarts=0)
    assert ended.code == GASP_WRITTEN, f"{ended.code} {ended.said}\n{ended.logs}"
    assert len([line for line in ended.said if "Start it again" in line]) == 1
    left = CheckpointDirectory(out / "gasp").latest(verify=True)
    assert not left.problems
    assert CheckpointDirectory(out / "gasp").tracked == left.path.name
    return world.run(Case(gasp=True, load=str(left.path)), out, max_restarts=0)


MOMENTS = {
    "first step": ("batch_start", 0),
    "mid-step": ("reduction", 2),
    "commit missed": ("before_commit", 2),
    "between commit and update": ("after_commit", 2),
    "in the update": ("update", 2),
    "in the gather": ("gather", 2),
    "scheduler": ("scheduler", 2),
    "end of a batch": ("train_batch_end", 3),
    "in validation": ("validation", 3),
    "end of an epoch": ("epoch_end", 3),
    "in a periodic save": ("checkpoint", 4),
}
# Ranks 0 and 2 hold shard 0, ranks 1 and 3 shard 1; ranks 0 and 1 are a replica.
LOST = {"rank 0": (0,), "one of each shard": (1, 2), "a whole replica": (0, 1)}


def sampled(every: int, *choices: Iterable[str | int]) -> list[Any]:
    """All combinations; all but some behind the marker."""
    cells = list(itertools.product(*choices))
    return [
        pytest.param(*cell, marks=() if number % every == 0 else pytest.mark.combinations, id=", ".join(map(str, cell)))
        for number, cell in enumerate(cells)
        if cell != ("exception", "in the update")  # test_every_rank_raises_while_its_shard_changes
    ]


@pytest.mark.parametrize("moment", sampled(2, MOMENTS))
def test_a_rank_is_killed_and_not_replaced(moment: str, untouched: world.Outcome, tmp_path: Path) -> None:
    point, step = MOMENTS[moment]
    resumed(Case(faults=(Fault("kill", 1, point, step),), gasp=True), tmp_path).assert_same(untouched)


@pytest.mark.parametrize(("moment", "lost"), sampled(4, ["first step", "in the update", "in validation"], LOST))
def test_others_are_killed(moment: str, lost: str, untouched: world.Outcome, tmp_path: Path) -> None:
    point, step = MOMENTS[moment]
    resumed(
        Case(faults=tuple(Fault("kill", rank, point, step) for rank in LOST[lost]), gasp=True), tmp_path
    ).assert_same(untouched)


@pytest.mark.parametrize(("kind", "moment"), sampled(5, ["sigterm", "interrupt", "exception"], MOMENTS))
def test_nobody_is_lost(kind: str, moment: str, untouched: world.Outcome, tmp_path: Path) -> None:
    """SIGTERM at one rank, Ctrl-C at another, an exception on every rank."""
    point, step = MOMENTS[moment]
    ranks = range(4) if kind == "exception" else (2,)
    resumed(Case(faults=tuple(Fault(kind, rank, point, step) for rank in ranks), gasp=True), tmp_path).assert_same(
        untouched
    )


@pytest.mark.parametrize("told", [signal.SIGTERM, signal.SIGINT, signal.SIGUSR1])
def test_the_supervisor_is_told(told: signal.Signals, untouched: world.Outcome, tmp_path: Path) -> None:
    """As by a scheduler, or a terminal."""
    resumed(Case(faults=(Fault(f"tell {told.value}", 0, "backward", 2),), gasp=True), tmp_path).assert_same(untouched)


@pytest.mark.parametrize(("point", "rank"), sampled(3, ["gasp", "gasp_write", "save", "track"], [0, 2]))
def test_a_second_rank_is_killed_while_it_writes(
    point: str, rank: int, untouched: world.Outcome, tmp_path: Path
) -> None:
    """Each shard still has a holder."""
    faults = Fault("kill", 1, "update", 2), Fault("kill", rank, point, None)
    resumed(Case(faults=faults, gasp=True), tmp_path).assert_same(untouched)
    assert (tmp_path / "fired1").exists()


def test_a_second_rank_hangs_while_it_writes(untouched: world.Outcome, tmp_path: Path) -> None:
    """It is found and killed as in any hang; who is left begins again without it."""
    faults = Fault("kill", 1, "update", 2), Fault("hang", 2, "gasp_write", None)
    resumed(Case(faults=faults, gasp=True, hang=(3.0, 20.0)), tmp_path).assert_same(untouched)
    assert (tmp_path / "fired1").exists()


class LosesItsDirectory(Callback):
    """Something else takes the directory's place while the run goes on."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory

    def on_train_batch_end(self, trainer: Any, *_: Any) -> None:
        if trainer.is_global_zero and not self.directory.is_file():
            self.directory.rmdir()
            self.directory.write_text("not a directory")


def loses_its_directory(case: Case, out: Path) -> None:
    job.run(case, out, (LosesItsDirectory(out / "gasp"),))


def test_nothing_can_be_written(tmp_path: Path) -> None:
    case = Case(faults=(Fault("kill", 1, "update", 2),), gasp=True)
    ended = world.run(case, tmp_path, max_restarts=0, target=loses_its_directory)
    assert ended.code == NOTHING_SAVED
    assert f"the last checkpoint could not be written: rank 0: {tmp_path / 'gasp'}/step_00000003.tmp-" in ended.logs


def test_every_rank_raises_while_its_shard_changes(tmp_path: Path) -> None:
    """There is no copy of a shard; what an update has left half-way is never saved."""
    case = Case(faults=tuple(Fault("exception", rank, "torn", 2) for rank in range(4)), gasp=True)
    ended = world.run(case, tmp_path, max_restarts=0)
    assert ended.code == NOTHING_SAVED
    assert "Shards 0, 1 were being updated, and are lost at step 2" in ended.logs
    assert os.listdir(tmp_path / "gasp") == [FAILURES]


@pytest.mark.parametrize("point", ["gasp_write", "save"])
def test_no_holder_is_left(point: str, tmp_path: Path) -> None:
    """The second is lost before it has written anything, or behind its part."""
    case = Case(faults=(Fault("kill", 1, "update", 2), Fault("kill", 3, point, 3)), gasp=True)
    ended = world.run(case, tmp_path, max_restarts=0)
    assert ended.code == NOTHING_SAVED
    assert (tmp_path / "fired1").exists()
    assert "Every holder of shard 1 is lost (ranks 1, 3)" in ended.logs
    assert [path.name for path in (tmp_path / "gasp").iterdir() if temporary_of(path.name) is None] == [FAILURES]
