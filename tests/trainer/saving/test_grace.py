"""Told to end, and the step does not: what becomes of it within `grace_s`, at its end, and on a second signal."""

import os
import signal
import time
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
from lightning.pytorch.callbacks import Callback

from lightning_replica import CheckpointPublisher
from lightning_replica.checkpoint.directory import CheckpointDirectory
from lightning_replica.exit_codes import GASP_WRITTEN, NOTHING_SAVED
from lightning_replica.launch.policy import COPY_S
from tests.support import job, world
from tests.support.job import Case


@dataclass
class Stuck(Case):
    """In the third step rank 0 has the supervisor told to end, and some ranks do not come to the step's end.

    ``waiting`` ones are in a collective that nobody else is in, ``busy`` ones in code that looks at nothing.
    """

    devices: int = 2
    hang: tuple[float, float] = (60.0, 120.0)  # longer than the grace, as by default
    gasp: bool = True
    load: str = "last"
    signals: tuple[signal.Signals, ...] = (signal.SIGTERM,)
    waiting: tuple[int, ...] = ()
    busy: tuple[int, ...] = ()


class GetsStuck(Callback):
    def __init__(self, case: Stuck, out: Path) -> None:
        self.case, self.out = case, out

    def on_train_batch_start(self, trainer: Any, *args: Any) -> None:
        rank = trainer.global_rank
        marker = self.out / f"stuck{rank}"
        if trainer.global_step != 2 or marker.exists():
            return
        marker.touch()
        while not all((self.out / f"stuck{busy}").exists() for busy in self.case.busy):
            time.sleep(0.01)  # nobody is told to end before all who get stuck are there
        for told in self.case.signals if rank == 0 else ():
            os.kill(int(os.environ["TESTED_BY"]), told)
            while not trainer.strategy.training.stop_requested:  # the supervisor has heard, and told all ranks
                time.sleep(0.01)
            time.sleep(1.1 * COPY_S)  # so that the next one is no copy of this one
        if rank in self.case.waiting:
            trainer.strategy.barrier()
        if rank in self.case.busy:
            time.sleep(1e6)


def trains(case: Stuck, out: Path) -> None:
    job.run(case, out, (GetsStuck(case, out), CheckpointPublisher(out / "gasp", every_n_train_steps=1)))


@pytest.fixture
def oracles(pair: world.Outcome, untouched: world.Outcome) -> dict[int, world.Outcome]:
    """Untouched runs by number of ranks."""
    return {2: pair, 4: untouched}


def ends(case: Stuck, out: Path, code: int, oracles: dict[int, world.Outcome]) -> tuple[str, list[str]]:
    """Why the newest checkpoint was written, which is of the second step, and what the supervisor said."""
    ended = world.run(case, out, max_restarts=0, target=trains)
    assert ended.code == code, f"{ended.said}\n{ended.logs}"
    assert "recovery failed" not in ended.logs  # nothing has failed: it was told to end
    latest = CheckpointDirectory(out / "gasp").latest(verify=True)
    assert latest.problems == ()
    assert latest.manifest is not None
    assert latest.manifest.step == 2
    again = world.run(replace(case, grace_s=25.0), out, max_restarts=0, target=trains)
    again.assert_same(oracles[case.devices])
    return latest.manifest.written_for, ended.said


def test_ranks_that_wait_are_called_back(oracles: dict[int, world.Outcome], tmp_path: Path) -> None:
    """Half of the grace is over: the last decided step."""
    why, said = ends(Stuck(waiting=(1,), grace_s=20.0), tmp_path, GASP_WRITTEN, oracles)
    assert why == "gasp"
    assert said[:2] == ["SIGTERM: all ranks save and end, within 20 s.", "The run was stopped by SIGTERM."]


def test_others_save_without_one_that_is_busy(oracles: dict[int, world.Outcome], tmp_path: Path) -> None:
    why, said = ends(Stuck(busy=(1,), devices=4, grace_s=24.0), tmp_path, GASP_WRITTEN, oracles)
    assert why == "gasp"
    assert "Rank 1 was busy and did not join the save; it was killed, and the others continue." in said


def test_all_are_busy(oracles: dict[int, world.Outcome], tmp_path: Path) -> None:
    """They are killed in the end; the periodic checkpoint of the same step is what there is."""
    why, said = ends(Stuck(busy=(0, 1), grace_s=2.0), tmp_path, NOTHING_SAVED, oracles)
    assert why == "periodic"
    assert said.count("2 s are over (grace_s); processes that have not ended are killed.") == 1


@pytest.mark.parametrize(
    "signals",
    [
        (signal.SIGTERM, signal.SIGINT),
        pytest.param((signal.SIGINT, signal.SIGTERM), marks=pytest.mark.combinations),
        pytest.param((signal.SIGUSR1, signal.SIGUSR1), marks=pytest.mark.combinations),
    ],
)
def test_a_second_signal_ends_all_at_once(
    signals: tuple[Any, ...], oracles: dict[int, world.Outcome], tmp_path: Path
) -> None:
    case = Stuck(signals=signals, busy=(0, 1))
    why, said = ends(case, tmp_path, 128 + signals[1], oracles)
    assert why == "periodic"
    assert said == [
        f"{signals[0].name}: all ranks save and end, within 25 s.",
        f"The run was stopped by {signals[1].name}.",
    ]
