"""A run that cannot go on, and the one that goes on from what it left: the untouched run, to the last bit."""

import itertools
import shutil
import signal
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from lightning.pytorch.callbacks import Callback

from lightning_replica.checkpoint.directory import CheckpointDirectory
from lightning_replica.checkpoint.publish import temporary_of
from lightning_replica.checkpoint.storage import FAILURES
from lightning_replica.exit_codes import GASP_WRITTEN, NOTHING_SAVED
from tests.support import job, world
from tests.support.directories import names_in
from tests.support.job import Case, Fault


def resumed(out: Path, *cases: Case) -> world.Outcome:
    """Runs each case to its end, from what the one before it has left; then on, with nothing in the way."""
    load = ""
    for number, case in enumerate(cases):
        ended = world.run(replace(case, gasp=True, load=load), out, max_restarts=0)
        assert ended.code == GASP_WRITTEN, f"{number}: {ended.code} {ended.said}\n{ended.logs}"
        assert len([line for line in ended.said if "Start it again" in line]) == 1
        for fault in range(len(case.faults)):
            (out / f"fired{fault}").rename(out / f"fired{number}.{fault}")
        left = CheckpointDirectory(out / "gasp").latest(verify=True)
        assert left.path is not None
        assert not left.problems
        assert CheckpointDirectory(out / "gasp").tracked == left.path.name
        load = str(left.path)
    return world.run(Case(gasp=True, load=load), out, max_restarts=0)


# Updates applied where a fault comes.
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
KINDS = ("sigterm", "interrupt", "exception")  # SIGTERM at one rank, Ctrl-C at another, an exception on every rank


def ends(kind: str, point: str, step: int | None, ranks: tuple[int, ...]) -> Case:
    return Case(tuple(Fault(kind, rank, point, step) for rank in ranks))


def nobody_is_lost(kind: str, point: str, step: int) -> Case:
    return ends(kind, point, step, (0, 1, 2, 3) if kind == "exception" else (2,))


# Several ends of one training, each run from what the one before it has left; points of the package count the steps of
# a run, those of the user's code all of them. All single ones are behind the marker.
SEVERAL = {
    "killed": (
        ends("kill", "batch_start", 0, (1,)),
        ends("kill", "before_commit", 2, (1,)),
        ends("kill", "checkpoint", 4, (1,)),
    ),
    "killed later": (
        ends("kill", "update", 1, (1,)),
        ends("kill", "validation", 3, (1,)),
        ends("kill", "scheduler", 4, (1,)),
    ),
    "others are killed": (
        ends("kill", "batch_start", 0, LOST["rank 0"]),
        ends("kill", "update", 2, LOST["one of each shard"]),
        ends("kill", "validation", 4, LOST["a whole replica"]),
    ),
    "nobody is lost": (
        nobody_is_lost("exception", "gather", 1),
        nobody_is_lost("sigterm", "before_commit", 0),
        nobody_is_lost("interrupt", "update", 0),
    ),
    "nobody is lost, again": (
        nobody_is_lost("exception", "reduction", 1),
        nobody_is_lost("sigterm", "forward", 2),
        nobody_is_lost("interrupt", "after_commit", 0),
    ),
    "the supervisor is told, as by a scheduler or a terminal": (
        ends(f"tell {signal.SIGTERM.value}", "backward", 1, (0,)),
        ends(f"tell {signal.SIGINT.value}", "backward", 3, (0,)),
        ends(f"tell {signal.SIGUSR1.value}", "backward", 4, (0,)),
    ),
}


@pytest.mark.parametrize("name", SEVERAL)
def test_a_run_ends_early_three_times(name: str, untouched: world.Outcome, tmp_path: Path) -> None:
    resumed(tmp_path, *SEVERAL[name]).assert_same(untouched)


@pytest.mark.combinations
@pytest.mark.parametrize("moment", MOMENTS)
def test_a_rank_is_killed_and_not_replaced(moment: str, untouched: world.Outcome, tmp_path: Path) -> None:
    resumed(tmp_path, ends("kill", *MOMENTS[moment], (1,))).assert_same(untouched)


@pytest.mark.combinations
@pytest.mark.parametrize("lost", LOST)
@pytest.mark.parametrize("moment", ["first step", "in the update", "in validation"])
def test_others_are_killed(moment: str, lost: str, untouched: world.Outcome, tmp_path: Path) -> None:
    resumed(tmp_path, ends("kill", *MOMENTS[moment], LOST[lost])).assert_same(untouched)


@pytest.mark.combinations
@pytest.mark.parametrize(
    ("kind", "moment"),
    [cell for cell in itertools.product(KINDS, MOMENTS) if cell != ("exception", "in the update")],
)  # test_every_rank_raises_while_its_shard_changes has that one
def test_nobody_is_lost(kind: str, moment: str, untouched: world.Outcome, tmp_path: Path) -> None:
    resumed(tmp_path, nobody_is_lost(kind, *MOMENTS[moment])).assert_same(untouched)


def while_it_writes(step: int, point: str, rank: int) -> Case:
    """Each shard still has a holder."""
    return Case((Fault("kill", 1, "update", step), Fault("kill", rank, point, None)))


@pytest.mark.parametrize(
    "cases",
    [
        (while_it_writes(1, "gasp", 0), while_it_writes(1, "gasp_write", 2), while_it_writes(0, "save", 0)),
        *(
            pytest.param((while_it_writes(2, point, rank),), marks=pytest.mark.combinations)
            for point, rank in itertools.product(["gasp", "gasp_write", "save", "track"], [0, 2])
        ),
    ],
    ids=str,
)
def test_a_second_rank_is_killed_while_it_writes(
    cases: tuple[Case, ...], untouched: world.Outcome, tmp_path: Path
) -> None:
    resumed(tmp_path, *cases).assert_same(untouched)


def test_a_second_rank_hangs_while_it_writes(untouched: world.Outcome, tmp_path: Path) -> None:
    """It is found and killed as in any hang; who is left begins again without it."""
    faults = Fault("kill", 1, "update", 2), Fault("hang", 2, "gasp_write", None)
    resumed(tmp_path, Case(faults, hang=(3.0, 20.0))).assert_same(untouched)


class LosesItsDirectory(Callback):
    """Something else takes the directory's place while the run goes on."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory

    def on_train_batch_end(self, trainer: Any, *_: Any) -> None:
        if trainer.is_global_zero and not self.directory.is_file():
            shutil.rmtree(self.directory)
            self.directory.write_text("not a directory")


def loses_its_directory(case: Case, out: Path) -> None:
    job.run(case, out, (LosesItsDirectory(out / "gasp"),))


def test_nothing_can_be_written(tmp_path: Path) -> None:
    case = Case(faults=(Fault("kill", 1, "update", 2),), gasp=True)
    ended = world.run(case, tmp_path, max_restarts=0, target=loses_its_directory)
    assert ended.code == NOTHING_SAVED
    why = f"rank 0: {tmp_path / 'gasp'} could not be written: File exists."
    assert f"the last checkpoint could not be written: {why}" in ended.logs


def test_every_rank_raises_while_its_shard_changes(tmp_path: Path) -> None:
    """There is no copy of a shard; what an update has left half-way is never saved."""
    case = Case(faults=tuple(Fault("exception", rank, "torn", 2) for rank in range(4)), gasp=True)
    ended = world.run(case, tmp_path, max_restarts=0)
    assert ended.code == NOTHING_SAVED
    assert "Shards 0, 1 were being updated, and are lost at step 2" in ended.logs
    assert names_in(tmp_path / "gasp") == [FAILURES]


@pytest.mark.parametrize("point", ["gasp_write", "save"])
def test_no_holder_is_left(point: str, tmp_path: Path) -> None:
    """The second is lost before it has written anything, or behind its part."""
    case = Case(faults=(Fault("kill", 1, "update", 2), Fault("kill", 3, point, 3)), gasp=True)
    ended = world.run(case, tmp_path, max_restarts=0)
    assert ended.code == NOTHING_SAVED
    assert (tmp_path / "fired1").exists()
    assert "Every holder of shard 1 is lost (ranks 1, 3)" in ended.logs
    assert [name for name in names_in(tmp_path / "gasp") if temporary_of(name) is None] == [FAILURES]
