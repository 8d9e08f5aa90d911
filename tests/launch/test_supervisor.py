"""What fails in the supervisor ends no healthy rank: the run goes on without it, or is saved."""

import signal
import tempfile
from pathlib import Path
from typing import Any

import pytest

from lightning_replica.core.signals import signal_name
from lightning_replica.exit_codes import GASP_WRITTEN, GAVE_UP
from lightning_replica.launch.standby import Standbys
from lightning_replica.launch.supervisor import Supervisor
from tests.support import world
from tests.support.forked import ForkedProcess
from tests.support.job import Case, Fault

KILL = (Fault("kill", 1, "reduction", 5),)


class NoProcess(ForkedProcess):
    """The machine has no room for another process."""

    def __init__(self, environment: dict[str, str], *arguments: Any) -> None:
        if environment["LIGHTNING_REPLICA_GENERATION"] != "0":
            raise BlockingIOError(11, "Resource temporarily unavailable")
        super().__init__(environment, *arguments)


def published(out: Path) -> list[str]:
    return [path.name for path in (out / "gasp").iterdir() if path.name.startswith("step_")]


def test_no_process_can_be_started_in_the_place_of_a_lost_one(tmp_path: Path) -> None:
    outcome = world.run(Case(KILL, gasp=True), tmp_path, process=NoProcess)
    assert outcome.code == GASP_WRITTEN, outcome.logs
    assert published(tmp_path) == ["step_00000005"]
    assert any("no process can be started in its place: BlockingIOError" in line for line in outcome.said)


def test_the_same_without_a_last_checkpoint(tmp_path: Path) -> None:
    outcome = world.run(Case(KILL), tmp_path, process=NoProcess)
    assert outcome.code == GAVE_UP, outcome.logs
    assert any("no process can be started in its place: BlockingIOError" in line for line in outcome.said)


def test_an_error_of_the_supervisor(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The ranks save."""
    failed = list[bool]()
    look = Supervisor._look

    def fails(self: Supervisor) -> None:
        if self._facts().in_fit and not failed:
            failed.append(True)
            raise ValueError("what nobody has thought of")
        look(self)

    monkeypatch.setattr(Supervisor, "_look", fails)
    case = Case((Fault("sleep", 1, "forward", 5),), gasp=True, hang=(4.0, 4.0))
    outcome = world.run(case, tmp_path)
    assert failed
    assert outcome.code == GASP_WRITTEN, outcome.logs
    assert published(tmp_path)
    (said,) = (line for line in outcome.said if "The supervisor has failed" in line)
    assert "ValueError: what nobody has thought of" in said


def test_a_supervisor_that_can_do_nothing_ends(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(self: Supervisor, event: object) -> None:
        raise ValueError("what nobody has thought of")

    monkeypatch.setattr(Supervisor, "_on", fails)
    with pytest.raises(ValueError, match="what nobody has thought of"):
        world.run(Case(), tmp_path)


def test_a_rank_is_killed_by_a_signal_without_a_name(tmp_path: Path) -> None:
    number = signal.SIGRTMIN + 6
    outcome = world.run(Case((Fault(f"hear {number}", 1, "reduction", 5),)), tmp_path)
    assert outcome.code == 0, outcome.logs
    assert any("Rank 1 died (SIGRTMIN+6)" in line for line in outcome.said)


@pytest.mark.parametrize(
    ("number", "name"), [(9, "SIGKILL"), (signal.SIGRTMIN + 3, "SIGRTMIN+3"), (signal.SIGRTMAX + 5, "signal 69")]
)
def test_names_of_signals(number: int, name: str) -> None:
    assert signal_name(number) == name


def test_a_standby_that_cannot_be_started(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    def full(*_: Any) -> None:
        raise OSError(28, "No space left on device")

    standbys = Standbys(lambda rank: (["python"], None), 2)
    standbys._modules, standbys._wanted = [], True
    monkeypatch.setattr(tempfile, "TemporaryFile", full)
    for _ in range(3):
        standbys.fill(5)
    assert standbys._waiting == []
    assert caplog.text.count("no standby can be started: [Errno 28] No space left on device") == 1
