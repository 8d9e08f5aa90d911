"""Ranks that hang: real processes, real signals. Every run ends with the bits of the one that was left alone."""

import os
import re
import signal
import threading
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from lightning_replica.core import pending_work
from lightning_replica.launch import stacks
from tests.support import job, world
from tests.support.forked import ForkedProcess
from tests.support.job import Case, Fault

WATCHED = Case(hang=(1.0, 5.0))
PATIENT = Case(hang=(20.0, 40.0))


def assert_killed(outcome: world.Outcome, untouched: world.Outcome, rank: int, where: str, times: int = 1) -> None:
    outcome.assert_same(untouched)
    assert len(outcome.said) == 2 * times, outcome.said
    found = re.match(
        rf"Rank {rank} hangs {re.escape(where)} \(no progress for ([\d.]+) s, its time-out is ([\d.]+) s\)",
        outcome.said[0],
    )
    assert found is not None, outcome.said
    assert float(found[1]) >= float(found[2]) >= WATCHED.hang[0], outcome.said
    replaced = rf"Rank {rank} hangs .* and was killed; a new process takes its place \(1 of 3\)\."
    assert re.fullmatch(replaced, outcome.said[1]), outcome.said
    assert f"rank {rank} was replaced" in outcome.logs


PLACES = {
    "forward": "in forward",
    "reduction": "in the reduction",
    "before_commit": "in the commit",
    "update": "in the update",
    "gather": "in the gather",
    "validation": "in validation",
}


@pytest.mark.parametrize(
    ("point", "rank"),
    [
        pytest.param(point, rank, marks=() if (number % 2 == 0) == (rank == 0) else pytest.mark.combinations)
        for number, point in enumerate(PLACES)
        for rank in (0, 3)
    ],
)
def test_a_stopped_rank(point: str, rank: int, untouched: world.Outcome, tmp_path: Path) -> None:
    fault = Fault("hang", rank, point, 1 if point == "validation" else 4)
    outcome = world.run(replace(WATCHED, faults=(fault,)), tmp_path)
    assert_killed(outcome, untouched, rank, PLACES[point])
    assert "it cannot show its stack: stopped by a signal" in outcome.said[0]


def test_a_hook_that_never_returns(untouched: world.Outcome, tmp_path: Path) -> None:
    outcome = world.run(replace(WATCHED, faults=(Fault("sleep", 1, "train_batch_end", 4),)), tmp_path)
    assert_killed(outcome, untouched, 1, "at the end of a batch")
    lines = outcome.said[0].splitlines()
    assert re.fullmatch(r'  File ".*job\.py", line \d+ in reach', lines[1]), lines  # time.sleep has no frame
    (directory,) = (tmp_path / "replica_stacks").iterdir()
    assert lines[-1] == f"The stacks of all ranks are in {directory}."
    files = {path.name: path.read_text() for path in directory.iterdir()}
    assert sorted(files) == [f"rank{rank}.txt" for rank in range(4)]
    assert re.match(r"rank 1, process \d+: at the end of a batch for [\d.]+ s\n", files["rank1.txt"])
    for rank in (0, 2, 3):
        assert re.match(rf"rank {rank}, process \d+: .* s, waits for others\n", files[f"rank{rank}.txt"])
        assert "core/pending_work.py" in files[f"rank{rank}.txt"]
        assert "monitor.py" in files[f"rank{rank}.txt"]  # all threads


class EndsSlowly(ForkedProcess):
    """A process whose end is seen late, as on a machine that is busy, or while it gives back a lot of memory."""

    def wait(self) -> int:
        code = super().wait()
        time.sleep(2 * WATCHED.hang[0])
        return code


def test_nobody_else_is_blamed_while_a_killed_rank_ends(untouched: world.Outcome, tmp_path: Path) -> None:
    fault = Fault("hang", 1, "forward", 4)
    outcome = world.run(replace(WATCHED, faults=(fault,)), tmp_path, process=EndsSlowly)
    assert_killed(outcome, untouched, 1, "in forward")


def test_a_rank_stops_while_its_peer_gives_it_its_shard(untouched: world.Outcome, tmp_path: Path) -> None:
    """The peer waits for it, and has a shorter time-out: it has been through more recoveries than a replacement."""
    raises = [Fault("exception", 0, "before_commit", step) for step in (0, 1, 2)]
    flipped = Fault("corrupt", 3, "before_commit", 4)
    faults = (*raises, Fault("kill", 3, "update", 3), flipped, Fault("hang", 3, "repair", 4))
    outcome = world.run(replace(WATCHED, faults=faults), tmp_path)
    outcome.assert_same(untouched)
    (hang,) = [said for said in outcome.said if "hangs in" in said and "was killed" in said]
    assert hang.startswith("Rank 3 hangs in recovery (repair)"), outcome.said


def at(step: int, act: Any, case: Case, out: Path) -> None:
    """Trains, with ``act(rank, first)`` in the training step of one batch; ``first`` is true once in the whole run."""
    original = job.Model.training_step

    def training_step(self: job.Model, batch: Any, batch_idx: int) -> Any:
        if (self.trainer.global_step, batch_idx % 2) == (step, 0):
            marker = out / f"acted{self.global_rank}-{step}"
            first = not marker.exists()
            marker.touch()
            act(self.global_rank, first)
        return original(self, batch, batch_idx)

    job.Model.training_step = training_step  # type: ignore[method-assign]
    job.run(case, out)


def locks_itself_out(rank: int, first: bool) -> None:
    if rank == 2 and first:
        lock = threading.Lock()
        lock.acquire()
        lock.acquire()


def sleeps_before_a_barrier(rank: int, first: bool) -> None:
    if rank == 2 and first:
        time.sleep(1e6)
    dist.barrier()


def waits_by_itself(rank: int, first: bool) -> None:
    if rank == 2 and first:
        time.sleep(1e6)
    work = dist.barrier(async_op=True)
    work.wait()


def fills_the_queue_of_its_device(rank: int, first: bool) -> None:
    """As a launch on a device that does not get on: it blocks the host, in any code."""
    if rank == 2 and first:
        time.sleep(1e6)
    work = dist.all_reduce(torch.ones(1), async_op=True)
    assert work is not None
    pending_work.Ordered(work)
    while not work.is_completed():
        time.sleep(0.01)


def leaves_a_barrier_out(rank: int, first: bool) -> None:
    if rank != 2 or not first:
        dist.barrier()


def _lock(case: Case, out: Path) -> None:
    at(4, locks_itself_out, case, out)


def _sleep(case: Case, out: Path) -> None:
    at(4, sleeps_before_a_barrier, case, out)


def _wait(case: Case, out: Path) -> None:
    at(4, waits_by_itself, case, out)


def _fill(case: Case, out: Path) -> None:
    at(4, fills_the_queue_of_its_device, case, out)


def _leave(case: Case, out: Path) -> None:
    at(4, leaves_a_barrier_out, case, out)


@pytest.mark.parametrize(
    ("run", "function"),
    [
        (_lock, locks_itself_out),
        (_sleep, sleeps_before_a_barrier),
        (_wait, waits_by_itself),
        (_fill, fills_the_queue_of_its_device),
    ],
    ids=["lock", "barrier", "wait", "queue"],
)
def test_the_one_that_others_wait_for(run: Any, function: Any, untouched: world.Outcome, tmp_path: Path) -> None:
    """In the barrier the others are past their time-outs too: their stacks tell that it is not their fault."""
    outcome = world.run(WATCHED, tmp_path, target=run)
    assert_killed(outcome, untouched, 2, "in forward")
    assert f"in {function.__name__}\n" in outcome.said[0]


def test_a_barrier_that_one_rank_leaves_out(untouched: world.Outcome, tmp_path: Path) -> None:
    """Everyone waits, each for something else: nobody is killed, all begin again."""
    outcome = world.run(WATCHED, tmp_path, target=_leave)
    outcome.assert_same(untouched, in_step=False)
    assert len(outcome.said) == 1, outcome.said
    said = outcome.said[0].splitlines()
    assert said[0].startswith("All ranks wait for each other, and nothing has moved for ")
    assert said[1] == "Ranks 0, 1, 3, in forward:"
    assert re.fullmatch(r'  File ".*test_hang\.py", line \d+ in leaves_a_barrier_out, which calls barrier', said[2])
    second = next(number for number, line in enumerate(said) if line.startswith("Rank 2, "))
    assert "leaves_a_barrier_out" not in "".join(said[second:])
    assert "no process was lost" in outcome.logs


def after_training(act: Any, case: Case, out: Path) -> None:
    job.run(case, out)
    act(int(os.environ["LOCAL_RANK"]), out)


def waits_alone(rank: int, out: Path) -> None:
    if rank == 0:
        dist.all_reduce(torch.ones(1))


def waits_elsewhere(rank: int, out: Path) -> None:
    group = dist.new_group()
    if rank == 1:  # once the supervisor has said what there is to say
        threading.Thread(target=ends_when_told, args=(out,), daemon=True).start()
    dist.all_reduce(torch.ones(1), group=group if rank == 0 else None)


def ends_when_told(out: Path) -> None:
    while not list((out / "replica_stacks").glob("*/rank1.txt")):
        time.sleep(0.01)
    os._exit(3)


def shows_its_stacks(rank: int, out: Path) -> None:
    file = stacks.answer()
    size = os.fstat(file).st_size
    os.kill(os.getpid(), stacks.SIGNAL)
    (out / f"shown{rank}").write_text(str(os.fstat(file).st_size > size))


def _alone(case: Case, out: Path) -> None:
    after_training(waits_alone, case, out)


def _elsewhere(case: Case, out: Path) -> None:
    after_training(waits_elsewhere, case, out)


def _shows(case: Case, out: Path) -> None:
    after_training(shows_its_stacks, case, out)


TWO = replace(WATCHED, devices=2)


def test_a_call_after_training_that_only_one_rank_makes(tmp_path: Path) -> None:
    outcome = world.run(TWO, tmp_path, target=_alone)
    assert outcome.code == 1, outcome.logs
    place = rf"{re.escape(__file__)}:\d+"
    assert re.fullmatch(
        rf"Rank 0 waited at {place} for rank 1, which had ended \(all ranks have to make this call, or none\)"
        " outside of training, where a rank cannot be replaced\\.",
        outcome.said[0],
    ), outcome.said


def test_different_calls_after_training(tmp_path: Path) -> None:
    """Nobody is killed. What each waits for is said once."""
    outcome = world.run(TWO, tmp_path, target=_elsewhere)
    assert outcome.code == 3, outcome.logs
    said = outcome.said[0].splitlines()
    assert said[0].startswith("All ranks wait for each other, and nothing has moved for ")
    assert "nobody can call them back" in said[0]
    assert any(line.endswith("in waits_elsewhere, which calls all_reduce") for line in said)
    assert not any("All ranks wait" in line for line in outcome.said[1:]), outcome.said


def test_stacks_can_be_had_after_a_fit(tmp_path: Path) -> None:
    """Lightning sets all signal handlers back when a fit is over."""
    outcome = world.run(TWO, tmp_path, target=_shows)
    assert outcome.code == 0, outcome.logs
    assert [(tmp_path / f"shown{rank}").read_text() for rank in range(2)] == ["True", "True"]


def _watched_closely(case: Case, out: Path) -> None:
    job.watch_closely(2, 5.0)
    job.run(case, out)


@pytest.mark.parametrize("point", ["regroup", "rollback"])
def test_in_a_recovery(point: str, untouched: world.Outcome, tmp_path: Path) -> None:
    faults = (Fault("kill", 1, "backward", 2), Fault("hang", 2, point, 2))
    outcome = world.run(replace(PATIENT, faults=faults), tmp_path, target=_watched_closely)
    outcome.assert_same(untouched)
    assert outcome.said[0].startswith("Rank 1 died (SIGKILL)")
    assert outcome.said[1].startswith(f"Rank 2 hangs in recovery ({point}) ")
    assert len(outcome.said) == 3


def _stopped_replacement(case: Case, out: Path) -> None:
    marker = out / "stopped"
    if os.environ["LIGHTNING_REPLICA_GENERATION"] != "0" and not marker.exists():
        marker.touch()
        os.kill(os.getpid(), signal.SIGSTOP)
    job.run(case, out)


def test_a_replacement_that_does_not_come(untouched: world.Outcome, tmp_path: Path) -> None:
    case = Case((Fault("kill", 1, "backward", 2),), hang=(5.0, 5.0))
    outcome = world.run(case, tmp_path, target=_stopped_replacement)
    outcome.assert_same(untouched)
    assert outcome.said[1].startswith("Rank 1 hangs at the start, before its first batch ")
    assert len(outcome.said) == 3


@pytest.mark.parametrize(
    "second",
    [pytest.param(Fault("hang", 3, "forward", 4), marks=pytest.mark.combinations), Fault("sleep", 0, "update", 5)],
    ids=str,
)
def test_two_hangs(second: Fault, untouched: world.Outcome, tmp_path: Path) -> None:
    faults = (Fault("hang", 0, "forward", 4), second)
    outcome = world.run(replace(WATCHED, faults=faults), tmp_path)
    outcome.assert_same(untouched)
    assert sum("a new process takes its place" in line for line in outcome.said) == 2


def _slow(case: Case, out: Path) -> None:
    original = job.Model.training_step

    def training_step(self: job.Model, batch: Any, batch_idx: int) -> Any:
        time.sleep(0.6 * (self.global_rank == 1 and self.trainer.global_step >= 4))
        return original(self, batch, batch_idx)

    job.Model.training_step = training_step  # type: ignore[method-assign]
    job.run(case, out)


def test_a_slow_rank_is_left_alone(untouched: world.Outcome, tmp_path: Path) -> None:
    outcome = world.run(WATCHED, tmp_path, target=_slow)
    outcome.assert_same(untouched)
    assert outcome.said == []


def _calls_the_supervisor(case: Case, out: Path) -> None:
    (out / f"pid{os.environ['LOCAL_RANK']}").write_text(str(os.getpid()))

    def act(rank: int, first: bool) -> None:
        if rank == 1 and first:
            os.kill(int((out / "supervisor").read_text()), signal.SIGUSR1)

    at(4, act, case, out)


def test_all_are_suspended_for_a_while(untouched: world.Outcome, tmp_path: Path) -> None:
    """Ctrl-Z, and fg. The supervisor is in this process: it is suspended by a signal handler that takes its time."""
    suspended: list[int] = []

    def send(signum: int) -> None:
        for pid in suspended:
            os.kill(pid, signum)

    def suspend(*_: object) -> None:
        suspended.extend(int((tmp_path / f"pid{rank}").read_text()) for rank in range(4))
        send(signal.SIGSTOP)
        time.sleep(3.0)
        threading.Timer(1.5, send, [signal.SIGCONT]).start()  # the supervisor is the first to wake

    (tmp_path / "supervisor").write_text(str(os.getpid()))
    before = signal.signal(signal.SIGUSR1, suspend)
    try:
        outcome = world.run(Case(hang=(2.0, 20.0)), tmp_path, target=_calls_the_supervisor)
    finally:
        signal.signal(signal.SIGUSR1, before)
    outcome.assert_same(untouched)
    assert len(suspended) == 4
    assert outcome.said == []
