"""Checkpoints that go to the disk while training goes on."""

import os
import signal
import threading
from pathlib import Path
from typing import Any

import pytest
from lightning.pytorch.callbacks import Callback

from lightning_replica import CheckpointPublisher, ConfigurationError
from lightning_replica.checkpoint.directory import CheckpointDirectory
from lightning_replica.core.points import listen
from lightning_replica.trainer.saving.async_save import AsyncSave
from tests.support import job, world
from tests.support.job import Case, Fault


def publisher(out: Path) -> CheckpointPublisher:
    return CheckpointPublisher(out / "kept", every_n_train_steps=4, async_save=True)


def publishes(case: Case, out: Path) -> None:
    job.run(case, out, (publisher(out),))


def kept(out: Path) -> list[str]:
    """The checkpoints, all of them whole; and nothing is left of others."""
    directory = CheckpointDirectory(out / "kept")
    found = sorted(directory.entries(verify=True), key=lambda entry: entry.path.name)
    assert not [entry.problem for entry in found if entry.problem]
    assert directory.tracked == found[-1].path.name
    return [entry.path.name.removeprefix("step_000000") for entry in found]


class HoldsUp(Callback):
    """Keeps what is written beside training, at the step ``due``, from its end until two more steps are done.

    Then a rank is killed. The second step waits until the first write is held up.
    """

    def __init__(self, out: Path, due: int, killed: int | None = None) -> None:
        self.out, self.due, self.killed = out, due, killed
        self.done = 0
        self.arrived = threading.Event()
        self.more = threading.Condition()

    def on_fit_start(self, trainer: Any, pl_module: Any) -> None:
        def hold(point: str) -> None:
            if point == "save" and threading.current_thread() is not threading.main_thread():
                self.arrived.set()
                with self.more:
                    self.more.wait_for(lambda: self.done >= self.due + 2)
                held = self.out / f"held{trainer.global_rank}"
                if trainer.global_rank == self.killed and not held.exists():
                    held.touch()
                    os.kill(os.getpid(), signal.SIGKILL)
                held.touch()

        self.stop = listen(hold)

    def on_train_batch_end(self, trainer: Any, *_: Any) -> None:
        if trainer.global_step == self.due + 2 and not (self.out / f"held{trainer.global_rank}").exists():
            self.arrived.wait()
        with self.more:
            self.done = trainer.global_step
            self.more.notify()

    def on_fit_end(self, trainer: Any, pl_module: Any) -> None:
        self.stop()


def holds_up(case: Case, out: Path) -> None:
    once = CheckpointPublisher(out / "kept", every_n_train_steps=7, async_save=True)
    job.run(case, out, (HoldsUp(out, due=7), once))


def test_training_goes_on_and_changes_nothing_in_it(pair: world.Outcome, tmp_path: Path) -> None:
    world.run(Case(devices=2), tmp_path, target=holds_up).assert_same(pair)
    assert kept(tmp_path) == ["07"]
    assert all((tmp_path / f"held{rank}").exists() for rank in range(2))
    rest = world.run(Case(devices=2, load=str(tmp_path / "kept" / "step_00000007")), tmp_path / "rest")
    assert rest.ranks == pair.ranks, rest.logs


@pytest.mark.parametrize("rank", [0, 1])
def test_a_rank_that_is_lost_while_it_writes(rank: int, pair: world.Outcome, tmp_path: Path) -> None:
    """Its part is on the disk, nothing is published; after the recovery it is written again."""
    outcome = world.run(Case(devices=2, faults=(Fault("kill", rank, "save", None),)), tmp_path, target=publishes)
    outcome.assert_same(pair)
    assert (tmp_path / "fired0").exists()
    found = kept(tmp_path)
    assert found[0] in ("04", "05", "06", "07")
    assert found[-2:] == ["08", "12"]
    rest = world.run(Case(devices=2, load=str(tmp_path / "kept" / f"step_000000{found[0]}")), tmp_path / "rest")
    assert rest.ranks == pair.ranks, rest.logs


def loses_a_rank(case: Case, out: Path) -> None:
    once = CheckpointPublisher(out / "kept", every_n_train_steps=7, async_save=True)
    job.run(case, out, (HoldsUp(out, due=7, killed=1), once))


def test_a_rank_that_is_lost_steps_later(pair: world.Outcome, tmp_path: Path) -> None:
    """What is missing is written again at once, not when the next is due."""
    outcome = world.run(Case(devices=2), tmp_path, target=loses_a_rank)
    outcome.assert_same(pair)
    assert kept(tmp_path) in (["09"], ["10"])


def test_a_rank_that_is_lost_meanwhile(pair: world.Outcome, tmp_path: Path) -> None:
    faults = Fault("kill", 1, "forward", 4), Fault("kill", 0, "update", 5), Fault("kill", 1, "train_end", 12)
    world.run(Case(devices=2, faults=faults), tmp_path, target=publishes).assert_same(pair)
    assert kept(tmp_path)[-1] == "12"


def stops_while_all_wait_for_it(case: Case, out: Path) -> None:
    """A rank is stopped once training is over, and its part of the last checkpoint is all that is missing."""
    waits, original = threading.Event(), AsyncSave.wait

    def wait(self: AsyncSave, check: Any) -> Any:
        waits.set()
        return original(self, check)

    def stop(point: str) -> None:
        marker = out / "stopped"
        beside = threading.current_thread() is not threading.main_thread()
        if point == "save" and beside and os.environ["LOCAL_RANK"] == "1" and not marker.exists():
            waits.wait()
            marker.touch()
            os.kill(os.getpid(), signal.SIGSTOP)

    AsyncSave.wait = wait  # type: ignore[method-assign]
    job.watch_closely(1, 4.0)
    listen(stop)
    job.run(case, out, (CheckpointPublisher(out / "kept", every_n_train_steps=12, async_save=True),))


def test_a_rank_that_stops_while_all_wait_for_it(pair: world.Outcome, tmp_path: Path) -> None:
    """The others say that they wait, so nobody takes them for ranks that hang."""
    outcome = world.run(Case(devices=2), tmp_path, target=stops_while_all_wait_for_it)
    outcome.assert_same(pair)
    assert [said.split(" (")[0] for said in outcome.said] == ["Rank 1 hangs while saving a checkpoint"] * 2
    assert kept(tmp_path) == ["12"]


class LosesItsDirectory(Callback):
    """Something else takes the directory's place while the run goes on."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory

    def on_train_batch_end(self, trainer: Any, *_: Any) -> None:
        if trainer.is_global_zero and trainer.global_step == 5 and self.directory.is_dir():
            while not (self.directory / "latest").exists():  # the checkpoint before is whole
                pass
            self.directory.rename(self.directory.with_name("away"))
            self.directory.write_text("not a directory")


def loses_its_directory(case: Case, out: Path) -> None:
    job.run(case, out, (LosesItsDirectory(out / "kept"), publisher(out)))


def test_what_cannot_be_written_is_said_and_training_goes_on(pair: world.Outcome, tmp_path: Path) -> None:
    """The last one is tried twice: beside training, and then at the end."""
    outcome = world.run(Case(devices=2), tmp_path, target=loses_its_directory)
    outcome.assert_same(pair)
    for step, times in ((8, 1), (12, 2)):
        why = f"{tmp_path}/kept could not be written: File exists."
        said = f"the checkpoint of step {step} could not be written: rank 0: {why}"
        assert outcome.logs.count(said) == times, outcome.logs
    assert outcome.logs.index("The save is tried once more.") < outcome.logs.index("This was the last checkpoint of")


def test_values_that_make_no_sense(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match="async_save='yes'"):
        CheckpointPublisher(tmp_path, async_save="yes")  # type: ignore[arg-type]
