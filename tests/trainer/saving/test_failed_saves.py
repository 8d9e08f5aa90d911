"""Periodic saves that fail: training goes on, what was whole stays, and the next is tried again."""

import errno
import os
import pathlib
import re
import signal
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from lightning.pytorch.callbacks import Callback

from lightning_replica import CheckpointPublisher, ConfigurationError
from lightning_replica.checkpoint.directory import CheckpointDirectory
from lightning_replica.checkpoint.storage import TRACKER
from tests.support import job, world
from tests.support.directories import names_in
from tests.support.job import Case, Fault
from tests.support.typed import on_disk

NO_SPACE = "No space left on device"


@dataclass
class Full(Case):
    """``rank`` finds no room for the checkpoints of the steps from 3 on, before step ``again``."""

    devices: int = 2
    gasp: bool = True
    rank: int = 0
    again: int = 9
    async_save: bool = False


class Disk(Callback):
    """Is full for a while. Only for checkpoints in the making: other files of a run are none of ours."""

    def __init__(self, case: Full) -> None:
        self.case, self.rank = case, -1
        really = pathlib.Path.open

        def open_if_there_is_room(path: Path, mode: str = "r", *args: Any, **kwargs: Any) -> Any:
            making = re.search(r"step_(\d+)\.tmp-", str(path))
            full = self.rank == case.rank and making is not None and 3 <= int(making[1]) < case.again
            if full and "w" in mode:
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            return really(path, mode, *args, **kwargs)

        pathlib.Path.open = open_if_there_is_room  # type: ignore[method-assign, assignment]

    def on_train_start(self, trainer: Any, *_: Any) -> None:
        self.rank = trainer.global_rank


def trains(case: Full, out: Path) -> None:
    kept = CheckpointPublisher(out / "gasp", every_n_train_steps=2, async_save=case.async_save)
    job.run(case, out, (Disk(case), kept))


CASES = {
    "rank 0": (Full(), "plain.pt", (4, 6, 8), "The next is due at step 8: make sure that it can be written."),
    "rank 1": (
        Full(rank=1),
        "__1_0.distcp",
        (4, 6, 8),
        "The next is due at step 10: make sure that it can be written.",
    ),
    # All ranks know of that of step 4 when 6 is due, which is then written at once, and in vain; likewise 8 and 10.
    "beside": (Full(again=11, async_save=True), "plain.pt", (4, 6, 8, 10), "Another is written now."),
}


@pytest.mark.parametrize("name", CASES)
def test_training_goes_on_and_the_next_is_written(name: str, pair: world.Outcome, tmp_path: Path) -> None:
    """All ranks agree, though one alone cannot write; and nothing in the training is different."""
    case, file, failed, then = CASES[name]
    outcome = world.run(case, tmp_path, max_restarts=0, target=trains)
    outcome.assert_same(pair)
    directory = CheckpointDirectory(tmp_path / "gasp")
    whole = [f"step_{step:08d}" for step in range(2, 13, 2) if step not in failed]
    assert names_in(on_disk(directory.path)) == [TRACKER, *whole]
    assert directory.tracked == whole[-1]
    assert directory.latest(verify=True).problems == ()
    for step in failed:
        said = f"the checkpoint of step {step} could not be written: rank {case.rank}: {directory.path_of(step)}.tmp-"
        assert outcome.logs.count(said) == 1, outcome.logs
    assert outcome.logs.count(f"{file} could not be written: {NO_SPACE}. Training continues") == len(failed)
    assert f"Training continues, and whole checkpoints stay. {then}" in outcome.logs
    assert "recovered" not in outcome.logs


def test_one_that_was_asked_for(pair: world.Outcome, tmp_path: Path) -> None:
    asked = Fault(f"hear {signal.SIGUSR2.value}", 1, "backward", 4)
    outcome = world.run(Full((asked,)), tmp_path, max_restarts=0, target=trains)
    outcome.assert_same(pair)
    said = "the checkpoint that was asked for could not be written: rank 0: "
    assert outcome.logs.count(said) == 1, outcome.logs


def test_values_that_make_no_sense(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match="must_save='no'"):
        CheckpointPublisher(tmp_path, must_save="no")  # type: ignore[arg-type]
