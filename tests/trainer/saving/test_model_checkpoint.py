"""Lightning's `ModelCheckpoint`, in the sharded form, in the directory of a `CheckpointPublisher`."""

import json
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

import pytest
from lightning.pytorch.callbacks import Callback, ModelCheckpoint

from lightning_replica import CheckpointPublisher
from lightning_replica.checkpoint.directory import CheckpointDirectory
from lightning_replica.checkpoint.storage import FAILURES
from lightning_replica.exit_codes import GAVE_UP
from tests.support import job, world
from tests.support.directories import names_in
from tests.support.job import Case, Fault


@dataclass
class Kept(Case):
    """The callback saves every third step, the publisher every fifth."""

    devices: int = 2
    top: int = -1
    last: bool | Literal["link"] = False


class Names(Callback):
    """Writes down what the tracker names when a batch begins, by the steps that are done."""

    def __init__(self, out: Path) -> None:
        self.out = out
        self.names: dict[int, str | None] = {}

    def on_train_batch_start(self, trainer: Any, *_: Any) -> None:
        self.names[trainer.global_step] = CheckpointDirectory(self.out / "kept").tracked

    def on_train_end(self, trainer: Any, *_: Any) -> None:
        if trainer.is_global_zero:
            (self.out / "names.json").write_text(json.dumps(self.names))


def trains(case: Kept, out: Path) -> None:
    kept = out / "kept"
    theirs = ModelCheckpoint(
        kept,
        "theirs-{step}",
        every_n_train_steps=3,
        save_top_k=case.top,
        save_last=case.last,
        monitor="step",
        mode="max",
    )
    ours: tuple[Callback, ...] = (theirs, CheckpointPublisher(kept, every_n_train_steps=5, keep_last=1))
    job.run(case, out, (Names(out), *ours), state_dict_type="sharded")


def entries(out: Path) -> set[str]:
    return set(names_in(out / "kept"))


def test_the_tracker_follows_and_each_removes_its_own(pair: world.Outcome, tmp_path: Path) -> None:
    """A rank is killed in one of the callback's saves, and replaced."""
    case = Kept((Fault("kill", 1, "save", 9),))
    world.run(case, tmp_path, target=trains).assert_same(pair)
    assert (tmp_path / "fired0").exists()
    theirs = {step: f"theirs-step={step}.ckpt" for step in (3, 6, 9, 12)}
    assert json.loads((tmp_path / "names.json").read_text()) == {
        **dict.fromkeys("012", None),
        **dict.fromkeys("34", theirs[3]),
        "5": "step_00000005",
        **dict.fromkeys("678", theirs[6]),
        "9": theirs[9],
        **dict.fromkeys(("10", "11"), "step_00000010"),
    }
    directory = CheckpointDirectory(tmp_path / "kept")
    assert directory.tracked == theirs[12]
    assert entries(tmp_path) == {"latest", "step_00000010", *theirs.values()}
    assert [entry.problem for entry in directory.entries(verify=True)] == [None] * 5


@pytest.mark.parametrize("last", [False, True, "link"])
def test_a_run_goes_on_from_it(last: bool | Literal["link"], pair: world.Outcome, tmp_path: Path) -> None:
    """Theirs is the newest when a rank is lost; what the callback removes is not what the tracker names."""
    case = Kept((Fault("kill", 1, "backward", 9),), top=1, last=last, load="last")
    assert world.run(case, tmp_path, max_restarts=0, target=trains).code == GAVE_UP
    directory, newest = CheckpointDirectory(tmp_path / "kept"), "last.ckpt" if last is True else "theirs-step=9.ckpt"
    links = {f"{directory.path}/last.ckpt is a symbolic link, which is not followed. Name its target instead."}
    lasts = {"last.ckpt"} if last else set()
    assert entries(tmp_path) == {"latest", FAILURES, "step_00000005", "theirs-step=9.ckpt", *lasts}
    assert directory.tracked == newest
    latest = directory.latest(verify=True)
    assert latest.path == directory.path / newest
    assert set(latest.problems) == (links if last == "link" else set())
    again = world.run(case, tmp_path, max_restarts=0, target=trains)
    again.assert_same(pair)
    assert f"resumes from {directory.path / newest}." in again.logs
    assert directory.tracked == newest.replace("9", "12")
    assert directory.latest(verify=True).path == directory.path / newest.replace("9", "12")


class AtEpochStart(Callback):
    """Fails where a rank would begin the next epoch; the last save is part of a tail that is done again then."""

    def __init__(self, case: Kept, out: Path) -> None:
        self.faults, self.marker = case.faults, out / "fired"

    def on_train_epoch_start(self, trainer: Any, *_: Any) -> None:
        for fault in self.faults:
            fault.reach("epoch_start", trainer.current_epoch, self.marker)


def saves_plainly(case: Kept, out: Path) -> None:
    job.run(replace(case, faults=()), out, (AtEpochStart(case, out), ModelCheckpoint(out / "kept", "{step}")))


@pytest.mark.parametrize("rank", [0, 1])
def test_a_file_that_is_written_again_keeps_its_name(rank: int, tmp_path: Path) -> None:
    """No ``-v1``, which would later be removed in its place."""
    case = Kept((Fault("kill", rank, "epoch_start", 1),))
    expected = world.run(Kept(), tmp_path / "untouched", target=saves_plainly)
    killed = world.run(case, tmp_path / "killed", target=saves_plainly)
    killed.assert_same(expected)
    assert (tmp_path / "killed" / "fired").exists()
    assert "the tail of the step is done again" in killed.logs
    assert entries(tmp_path / "killed") == entries(tmp_path / "untouched") == {"step=12.ckpt"}
