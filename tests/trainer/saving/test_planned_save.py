"""A checkpoint that a run is asked for, and which does not stop it."""

import multiprocessing
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
from lightning.pytorch.callbacks import Callback

from lightning_replica.checkpoint.directory import CheckpointDirectory
from lightning_replica.cli.main import main
from lightning_replica.control import planned_save
from tests.support import job, world
from tests.support.job import Case, Fault

USR2 = signal.SIGUSR2.value
TWO = Case(devices=2, gasp=True)


def saved(out: Path) -> dict[str, str]:
    """Name of each checkpoint, and why it was written."""
    entries = list(CheckpointDirectory(out / "gasp").entries(verify=True))
    assert not [entry.problem for entry in entries if entry.problem]
    return {entry.path.name: entry.manifest.written_for for entry in entries if entry.manifest}


@pytest.mark.parametrize(
    "faults",
    [
        pytest.param((Fault(f"tell {USR2}", 0, "backward", 2),), id="the supervisor"),
        pytest.param((Fault(f"hear {USR2}", 1, "backward", 2),), id="one rank"),
        pytest.param((Fault(f"hear {USR2}", 0, "train_batch_end", 2), Fault("kill", 1, "update", 2)), id="and a loss"),
    ],
)
def test_all_ranks_save_and_go_on(faults: tuple[Fault, ...], pair: world.Outcome, tmp_path: Path) -> None:
    outcome = world.run(Case(devices=2, gasp=True, faults=faults), tmp_path)
    outcome.assert_same(pair)
    (name,) = saved(tmp_path)
    assert saved(tmp_path) == {name: "planned"}
    assert CheckpointDirectory(tmp_path / "gasp").tracked == name
    assert outcome.logs.count(f"{tmp_path / 'gasp' / name} is written, as asked.") == 1
    again = Case(devices=2, gasp=True, load=str(tmp_path / "gasp" / name))
    rest = world.run(again, tmp_path / "again")
    assert rest.ranks == pair.ranks, rest.logs
    for seen, whole in zip(rest.batches, pair.batches, strict=True):
        assert 0 < len(seen) < len(whole)
        assert all(whole[place] == digests for place, digests in seen.items())


@pytest.mark.parametrize(("rank", "point", "step"), [(0, "save", 4), (1, "save", 4), (1, "batch_start", 3)])
def test_a_rank_that_is_lost_meanwhile(rank: int, point: str, step: int, pair: world.Outcome, tmp_path: Path) -> None:
    """Whoever was asked and is still there asks again, with the next commit; in a tail, with the same."""
    asked = tuple(Fault(f"hear {USR2}", each, "backward", 2) for each in range(2))
    outcome = world.run(Case(devices=2, gasp=True, faults=(*asked, Fault("kill", rank, point, 3))), tmp_path)
    outcome.assert_same(pair)
    assert (tmp_path / "fired2").exists()
    assert saved(tmp_path) == {f"step_{step:08d}": "planned"}


def test_nobody_has_said_where(pair: world.Outcome, tmp_path: Path) -> None:
    outcome = world.run(Case(devices=2, faults=(Fault(f"tell {USR2}", 0, "backward", 2),)), tmp_path)
    assert outcome.code == 0
    assert outcome.ranks == pair.ranks
    assert outcome.said == [
        "SIGUSR2: nothing is saved. Either training is not under way, or it has neither a CheckpointPublisher nor a"
        " DyingGaspCheckpoint, which name the directory."
    ]


class Asks(Callback):
    """Runs the command beside training, and waits until it has asked."""

    def __init__(self, out: Path) -> None:
        self.out = out

    def on_train_batch_end(self, trainer: Any, *_: Any) -> None:
        if trainer.global_step != 3 or not trainer.is_global_zero or (self.out / "asked").exists():
            return
        assert planned_save.listens(os.getpid())  # a rank can be asked too
        line = [sys.executable, "-m", "lightning_replica", "save", os.environ["TESTED_BY"], "--dirpath"]
        with (self.out / "asked").open("w") as file:
            self.command = subprocess.Popen([*line, str(self.out / "gasp")], stdout=file, stderr=file)
        while not trainer.strategy.training.save_requested:
            assert self.command.poll() is None

    def on_train_end(self, trainer: Any, *_: Any) -> None:
        if trainer.is_global_zero:
            assert self.command.wait() == 0


def asks(case: Case, out: Path) -> None:
    job.run(case, out, (Asks(out),))


def test_the_command(pair: world.Outcome, tmp_path: Path) -> None:
    world.run(TWO, tmp_path, target=asks).assert_same(pair)
    (name,) = saved(tmp_path)
    assert (tmp_path / "asked").read_text() == f"{tmp_path / 'gasp' / name} is written.\n"


# What handles the signal and is no run all the same: a shell that cleans up at its end handles every signal with which
# it could end, and then ends.
OTHERS = {
    "a program": ["cat"],
    "a shell with a trap": ["bash", "-c", "trap 'echo ended' EXIT; echo; read"],
    "a shell that handles the signal": ["bash", "-c", "trap 'echo heard; exit 3' USR2; echo; read"],
}


@pytest.mark.parametrize("other", OTHERS)
def test_a_process_that_is_no_run_lives_on(other: str, capsys: pytest.CaptureFixture[str]) -> None:
    with subprocess.Popen(OTHERS[other], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        if other != "a program":
            assert process.stdout is not None
            assert process.stdout.readline() == b"\n"  # its traps are set
        assert main(["save", str(process.pid)]) == 2
        assert f"Process {process.pid} is not a run that can be asked to save" in capsys.readouterr().err
        process.communicate(b"\n")
    assert process.returncode == 0


def test_a_worker_of_a_run_is_not_the_run(capsys: pytest.CaptureFixture[str]) -> None:
    """It has all that its parent has open."""
    with planned_save.listening():
        assert planned_save.listens(os.getpid())
        worker = multiprocessing.get_context("fork").Process(target=sys.stdin.read)
        worker.start()
        assert worker.pid is not None
        assert not planned_save.listens(worker.pid)
        assert main(["save", str(worker.pid)]) == 2
        worker.kill()
        worker.join()
    assert not planned_save.listens(os.getpid())


def test_nobody_there(capsys: pytest.CaptureFixture[str]) -> None:
    with subprocess.Popen(["cat"], stdin=subprocess.PIPE) as other:
        assert other.stdin is not None
        other.stdin.close()
    assert main(["save", str(other.pid)]) == 2
    assert f"/proc shows no process {other.pid} here" in capsys.readouterr().err
    assert main(["save", str(os.getpid()), "--timeout-s", "0"]) == 2
    assert "timeout_s=0.0 must be a number of seconds" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("error", "said"),
    [
        (ProcessLookupError, "Process 7 has just ended."),
        (PermissionError, "Process 7 belongs to another user: ask as that user"),
    ],
)
def test_a_run_that_cannot_be_sent_a_signal(
    error: type[OSError], said: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(planned_save, "listens", lambda pid: True)
    monkeypatch.setattr(os, "kill", Mock(side_effect=error))
    assert main(["save", "7"]) == 2
    assert said in capsys.readouterr().err
