"""SIGTERM at one rank: all ranks agree on it in the next commit, and end with that batch. Ctrl-C at all of them."""

import os
import signal
from pathlib import Path
from typing import Any

from lightning.pytorch.utilities.exceptions import SIGTERMException

from lightning_replica.checkpoint.directory import CheckpointDirectory
from lightning_replica.exit_codes import GASP_WRITTEN
from tests.support import job, world
from tests.support.job import Case


def one_is_told(case: Case, out: Path) -> None:
    original = job.Model.training_step

    def training_step(self: job.Model, batch: Any, batch_idx: int) -> dict[str, Any]:
        if (self.global_rank, self.trainer.global_step, batch_idx) == (1, 2, 4):
            os.kill(os.getpid(), signal.SIGTERM)
        return original(self, batch, batch_idx)

    job.Model.training_step = training_step  # type: ignore[method-assign]
    job.run(case, out)


def test_all_ranks_end_with_the_same_batch(tmp_path: Path) -> None:
    outcome = world.run(Case(devices=2), tmp_path, target=one_is_told)
    assert outcome.ranks == [{}, {}], outcome.logs  # nobody came to the end
    # The window of batches 4 and 5 leads to the third step; its commit carries the word.
    assert [list(seen)[-1] for seen in outcome.batches] == ["0 5", "0 5"], outcome.logs
    assert "recovered" not in outcome.logs
    assert (outcome.code, outcome.said) == (0, [])  # as under DDP; a supervisor that is told itself ends with 143


def one_is_told_in_a_later_lightning(case: Case, out: Path) -> None:
    """Lightning's pull request 21623, which is merged and not released: the exception ends a process with 143."""

    def end_with_143(self: SIGTERMException) -> None:
        SystemExit.__init__(self, 143)

    SIGTERMException.__init__ = end_with_143  # type: ignore[method-assign, assignment]
    one_is_told(case, out)


def test_all_ranks_end_with_the_code_of_a_later_lightning(tmp_path: Path) -> None:
    outcome = world.run(Case(devices=2), tmp_path, target=one_is_told_in_a_later_lightning)
    assert outcome.ranks == [{}, {}], outcome.logs
    assert [list(seen)[-1] for seen in outcome.batches] == ["0 5", "0 5"], outcome.logs
    assert "takes its place" not in outcome.logs
    assert outcome.code == 143  # as under DDP of that version


def test_the_code_of_a_last_checkpoint_precedes_it(tmp_path: Path) -> None:
    outcome = world.run(Case(devices=2, gasp=True), tmp_path, target=one_is_told_in_a_later_lightning)
    assert outcome.code == GASP_WRITTEN, outcome.logs
    assert CheckpointDirectory(tmp_path / "gasp").latest(verify=True) is not None


def interrupted(case: Case, out: Path) -> None:
    """Every rank gets Ctrl-C in a step; a second one may come while the interpreter ends."""

    original = job.Model.training_step

    def training_step(self: job.Model, batch: object, batch_idx: int) -> object:
        original(self, batch, batch_idx)  # where all ranks meet
        os.kill(os.getpid(), signal.SIGINT)
        return None

    job.Model.training_step = training_step  # type: ignore[method-assign, assignment]
    try:
        job.run(case, out)
    finally:
        (out / f"handler{os.environ['LOCAL_RANK']}").write_text(str(signal.getsignal(signal.SIGINT)))


def test_a_second_interrupt_does_not_disturb_the_end(tmp_path: Path) -> None:
    outcome = world.run(Case(devices=2), tmp_path, max_restarts=0, target=interrupted)
    assert outcome.code != 0
    assert "Detected KeyboardInterrupt" in outcome.logs
    ignored = str(signal.SIG_IGN)
    assert [(tmp_path / f"handler{rank}").read_text() for rank in range(2)] == [ignored, ignored]
