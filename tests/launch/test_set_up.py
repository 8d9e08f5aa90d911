"""Ranks that stop, hang, die or only take long before their first batch; real processes, real signals."""

import os
import re
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest

from lightning_replica.core.options import RecoveryOptions
from lightning_replica.exit_codes import GAVE_UP
from lightning_replica.launch.activity import Activity
from lightning_replica.launch.beacons import HangLimits
from lightning_replica.launch.node import Process, start_script
from lightning_replica.launch.node_context import LOOPBACK
from lightning_replica.launch.set_up import SetUp
from lightning_replica.launch.supervisor import Supervisor
from lightning_replica.stores import tcp
from lightning_replica.stores.tcp import connect, serve
from tests.support import job, world
from tests.support.forked import ForkedProcess
from tests.support.job import Case, Fault

WATCHED = Case(devices=2, hang=(1.0, 3.0))
START = "Rank 1 hangs at the start, before its first batch"


@pytest.mark.parametrize("point", ["setup", pytest.param("train_start", marks=pytest.mark.combinations)])
@pytest.mark.parametrize("kind", ["hang", "sleep"])
def test_a_rank_that_does_not_come_to_its_first_batch(kind: str, point: str, tmp_path: Path) -> None:
    outcome = world.run(replace(WATCHED, faults=(Fault(kind, 1, point, -1),)), tmp_path)
    assert outcome.code == GAVE_UP, outcome.logs
    said = [line for line in outcome.said if "is at work" not in line]  # which it is until it stops
    assert len(said) == 2, outcome.said
    assert said[0].startswith(START), outcome.said
    how = "a signal has stopped it" if kind == "hang" else r"no progress for [\d.]+ s, its time-out is [\d.]+ s"
    killed = rf"{START} \({how}\) and was killed before its first batch, where a rank cannot be replaced\."
    assert re.fullmatch(killed, said[1]), outcome.said
    if kind == "sleep":
        assert "job.py" in said[0]  # its stack
    (directory,) = (tmp_path / "replica_stacks").iterdir()
    assert sorted(path.name for path in directory.iterdir()) == ["rank0.txt", "rank1.txt"]


class EndsLate(ForkedProcess):
    """The end of rank 1 is seen after those of ranks that have ended because of it, as on a machine that is busy."""

    def __init__(self, environment: dict[str, str], *arguments: Any) -> None:
        self._is_late = environment["LOCAL_RANK"] == "1"
        super().__init__(environment, *arguments)

    def wait(self) -> int:
        code = super().wait()
        if self._is_late:
            time.sleep(2.0)
        return code


def test_who_ends_because_of_a_rank_that_hung_is_not_the_cause(tmp_path: Path) -> None:
    outcome = world.run(replace(WATCHED, faults=(Fault("hang", 1, "setup", -1),)), tmp_path, process=EndsLate)
    assert outcome.code == GAVE_UP, outcome.logs
    assert [line for line in outcome.said if "Rank 0" in line and "is at work" not in line] == []


def absent(case: Case, out: Path) -> None:
    """Rank 1 does not train."""
    if os.environ["LOCAL_RANK"] != "1":
        job.run(case, out)


def test_a_rank_that_does_not_call_fit(tmp_path: Path) -> None:
    outcome = world.run(Case(devices=2), tmp_path, target=absent)
    assert outcome.code == 1, outcome.logs
    said = "Rank 1 ended without an error, and other ranks wait for it: `fit`, `validate`, `test` and `predict` are"
    assert f"ConfigurationError: {said} for all ranks." in outcome.said[0], outcome.said


@pytest.mark.parametrize(
    ("kind", "code", "how"), [("kill", 137, "died (SIGKILL)"), ("exit", 3, "ended with exit code 3")]
)
def test_a_rank_that_dies_before_its_first_batch(kind: str, code: int, how: str, tmp_path: Path) -> None:
    outcome = world.run(Case((Fault(kind, 1, "setup", -1),), devices=2), tmp_path)
    assert outcome.code == code, outcome.logs
    assert outcome.said == [f"Rank 1 {how} before its first batch, where a rank cannot be replaced."]
    assert "Traceback" not in outcome.logs, outcome.logs  # of the other, which is not at fault


def test_a_rank_that_raises_before_its_first_batch(tmp_path: Path) -> None:
    outcome = world.run(Case((Fault("exception", 1, "setup", -1),), devices=2), tmp_path)
    assert outcome.code == 1, outcome.logs
    (said,) = outcome.said
    place = rf"{re.escape(job.__file__)}:\d+"
    assert re.fullmatch(
        rf"Rank 1 ended with .*Injected: at setup of step -1 \({place}\) before its first batch, where .*", said
    ), said


def works_until_told(case: Case, out: Path) -> None:
    original = job.Faults.setup

    def setup(self: job.Faults, trainer: Any, *args: Any, **kwargs: Any) -> None:
        while trainer.global_rank == 1 and not (out / "told").exists():
            sum(range(10000))
        original(self, trainer, *args, **kwargs)

    job.Faults.setup = setup  # type: ignore[method-assign]
    job.run(case, out)


@pytest.mark.combinations  # it takes the minute that it is about
def test_a_rank_that_takes_long_is_told_of_and_left_alone(tmp_path: Path) -> None:
    said: list[str] = []

    def start(rank: int, variables: dict[str, str]) -> Process:
        return ForkedProcess(variables, tmp_path / f"log{rank}", works_until_told, Case(devices=2), tmp_path)

    def say(line: str) -> None:
        said.append(line)
        (tmp_path / "told").touch()

    code = Supervisor(start, 2, RecoveryOptions(hang_min_s=0.5, hang_max_s=2.0), say, tmp_path).run()
    assert code == 0, (tmp_path / "log1").read_text()
    assert re.match(r"Rank 1 has not reached its first batch for \d+ s, but is at work\. Its stack, ", said[0]), said
    assert "test_set_up.py" in said[0]
    assert not [line for line in said if "killed" in line]


def judge(*uses: list[float]) -> list[Any]:
    """What is judged of two ranks past their time, looked at every half a second; each uses so much in that time."""
    watched, used = SetUp(HangLimits(min_s=1.0, max_s=10.0)), [0.0, 0.0]
    verdicts = []
    for number in range(len(uses[0])):
        used = [so_far + use[number] for so_far, use in zip(used, uses, strict=True)]
        now = {7: Activity(used[0]), 8: Activity(used[1])}
        verdicts.append(watched.judge([1], {0: 7, 1: 8}, number / 2, now.__getitem__))
    return [(v.hanging, v.at_work) for v in verdicts]


def test_who_hangs_and_who_is_at_work() -> None:
    nobody: tuple[Any, Any] = ((), ())
    assert judge([0.0] * 3, [0.0] * 3) == [nobody, nobody, ((1,), ())]
    assert judge([0.0] * 3, [0.0, 0.001, 0.001]) == [nobody, nobody, ((1,), ())]  # a thread that looks around
    assert judge([0.0] * 3, [0.0, 0.2, 0.0]) == [nobody, nobody, ((), (1,))]
    assert judge([0.0, 0.2, 0.0], [0.0] * 3) == [nobody, nobody, ((), (0,))]  # the one that rank 1 may wait for
    assert judge([0.2] * 30, [0.2] * 30).count(((), (0, 1))) == 2  # told once in ten seconds


def _works(ready: str, until: str) -> None:
    child = os.fork()
    if child == 0:
        while not Path(until).exists():
            sum(range(10000))
        os._exit(0)
    Path(ready).touch()
    os.waitpid(child, 0)


def test_the_work_of_children_counts(tmp_path: Path) -> None:
    process = ForkedProcess(dict(os.environ), tmp_path / "log", _works, str(tmp_path / "ready"), str(tmp_path / "end"))
    while not (tmp_path / "ready").exists():
        time.sleep(0.01)
    before = Activity.of(process.pid)
    while not Activity.of(process.pid).is_work_since(before, 1.0):
        time.sleep(0.01)  # for ever, if it were not seen
    (tmp_path / "end").touch()
    assert process.wait() == 0
    assert Activity.of(process.pid) == Activity()


def _supervises(out: str) -> None:
    """A supervisor whose ranks are still busy importing, and know nothing of this package."""
    code = f"import os, time; open('{out}/' + str(os.getpid()), 'w').close(); time.sleep(1e6)"
    start = start_script(lambda _: ([sys.executable, "-S", "-c", code], None))
    Supervisor(start, 2, RecoveryOptions(), print).run()


@contextmanager
def forked(log: Path, target: Any, *args: Any) -> Iterator[ForkedProcess]:
    process = ForkedProcess(dict(os.environ), log, target, *args)
    try:
        yield process
    finally:
        process.send_signal(signal.SIGKILL)
        process.wait()


def wait_until(ready: Callable[[], Any], otherwise: str) -> None:
    deadline = time.monotonic() + 60
    while not ready():
        assert time.monotonic() < deadline, otherwise
        time.sleep(0.01)


def test_ranks_that_import_end_with_their_supervisor(tmp_path: Path) -> None:
    out = tmp_path / "ranks"
    out.mkdir()
    ranks: list[int] = []
    try:
        with forked(tmp_path / "log", _supervises, str(out)):
            wait_until(lambda: len(list(out.iterdir())) == 2, "ranks do not start")
            ranks = [int(path.name) for path in out.iterdir()]
            assert all(Path(f"/proc/{rank}").exists() for rank in ranks)
        wait_until(lambda: not any(Path(f"/proc/{rank}").exists() for rank in ranks), "ranks outlive their supervisor")
    finally:
        for rank in ranks:
            with suppress(ProcessLookupError):
                os.kill(rank, signal.SIGKILL)


def _serves(port: str) -> None:
    store = serve(LOOPBACK)
    Path(port).write_text(str(store.port))
    time.sleep(1e6)


def test_a_supervisor_that_is_stopped_for_longer_than_connecting_may_take(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its store is silent meanwhile. Ctrl-Z, and fg after lunch."""
    port = tmp_path / "port"
    monkeypatch.setattr(tcp, "_CONNECT", timedelta(seconds=1))
    with forked(tmp_path / "log", _serves, str(port)) as process:
        wait_until(lambda: port.exists() and port.read_text(), "nobody serves")
        store = connect(LOOPBACK, int(port.read_text()))
        store.set("key", "value")
        process.send_signal(signal.SIGSTOP)
        threading.Timer(2.5, process.send_signal, [signal.SIGCONT]).start()
        assert store.get("key") == b"value"
