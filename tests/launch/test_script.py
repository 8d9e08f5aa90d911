"""`python script.py`, as a user starts it."""

import fcntl
import os
import pty
import re
import signal
import subprocess
import sys
import termios
import time
from pathlib import Path
from typing import Any

import pytest

from lightning_replica.checkpoint.directory import CheckpointDirectory
from lightning_replica.exit_codes import GASP_WRITTEN
from tests.support import forked_python

SCRIPT = Path(__file__).parents[1] / "support" / "script.py"


def start(mode: str, rank: int, prefix: tuple[str, ...] = (), **environment: str) -> "subprocess.Popen[str]":
    return subprocess.Popen(
        [*prefix, sys.executable, "-W", "ignore", str(SCRIPT), mode, str(rank)],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONWARNINGS": "ignore", **environment},
        start_new_session=True,  # a process group of its own, for Ctrl-C
    )


def finish(process: "subprocess.Popen[str]") -> str:
    try:
        return process.communicate(timeout=200)[0]
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)


def results(output: str) -> dict[str, str]:
    return dict(re.findall(r"rank (\d) pid \d+ (\w+ [\d.]+)", output))


def wait_for(process: "subprocess.Popen[str]", text: str) -> None:
    assert process.stdout is not None
    for line in process.stdout:
        if text in line:
            return
    raise AssertionError(f"ended without saying {text!r}")


def forked(folder: Path, mode: str, rank: int) -> "subprocess.CompletedProcess[str]":
    """The same without the seconds that three Pythons take to start, for what does not depend on how they start."""
    line = [sys.executable, str(SCRIPT), mode, str(rank)]
    return forked_python.run(line, folder, {**os.environ, "OMP_NUM_THREADS": "1"}, folder / "output", 200)


@pytest.fixture(scope="module")
def untouched(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    done = forked(tmp_path_factory.mktemp("untouched"), "none", 0)
    assert done.returncode == 0, done.stdout
    assert "replica_zero:" not in done.stdout
    found = results(done.stdout)
    assert len(found) == 2
    assert len(set(found.values())) == 1
    return found


@pytest.mark.parametrize(("rank", "standby"), [pytest.param(0, 1, marks=pytest.mark.combinations), (1, 0)])
def test_a_killed_rank_comes_back(rank: int, standby: int, untouched: dict[str, str]) -> None:
    process = start("kill", rank, STANDBY=str(standby))
    output = finish(process)
    assert process.returncode == 0, output
    assert results(output) == untouched
    who = "a standby" if standby else "a new process"
    assert f"Rank {rank} died (SIGKILL); {who} takes its place (1 of 3)" in output
    assert len(re.findall(rf"recovered at step 2 in [\d.]+ s: rank {rank} was replaced", output)) == 1
    assert re.findall(r"rank (\d) was a standby", output) == [str(rank)] * standby
    assert "on_exception" not in output  # neither in a rank nor in the supervisor


def test_a_crash_that_comes_again_is_not_replaced_for_ever() -> None:
    process = start("abort", 1)
    output = finish(process)
    assert process.returncode == 128 + signal.SIGABRT, output
    said = [line for line in output.splitlines() if line.startswith("replica_zero: Rank 1 died")]
    line = next(n for n, text in enumerate(SCRIPT.read_text().splitlines(), 1) if "os.abort()" in text)
    how = f"Rank 1 died (SIGABRT) at {SCRIPT}:{line} in on_after_backward"
    assert said == [
        f"replica_zero: {how}; a new process takes its place (1 of 3).",
        f"replica_zero: {how}, twice in the reduction of step 2: another process would end there too.",
    ]


def test_the_exit_code_of_a_rank_is_that_of_the_run(tmp_path: Path) -> None:
    done = forked(tmp_path, "exit", 1)
    assert done.returncode == 7, done.stdout
    assert "Rank 1 ended with exit code 7 outside of training" in done.stdout


def test_ranks_that_never_train(tmp_path: Path) -> None:
    done = forked(tmp_path, "nothing", 0)
    assert done.returncode == 0, done.stdout
    assert "replica_zero: all ranks have ended, and none has called `fit`" in done.stdout


def test_without_docstrings() -> None:
    code = "import lightning_replica, lightning as L; L.Trainer(strategy='replica_zero', accelerator='cpu', devices=2)"
    done = subprocess.run([sys.executable, "-OO", "-c", code], capture_output=True, text=True, timeout=200)
    assert "this script came from `python -c`" in done.stderr  # it has come that far


def ranks_of(process: "subprocess.Popen[Any]") -> list[int]:
    children = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
    return [int(child) for child in children]


def all_gone(pids: list[int]) -> None:
    deadline = time.monotonic() + 30
    while any(Path(f"/proc/{pid}").exists() for pid in pids):
        assert time.monotonic() < deadline, "ranks outlive their supervisor"
        time.sleep(0.01)


def test_ranks_end_with_their_supervisor() -> None:
    process = start("wait", 1)
    wait_for(process, "waiting")
    pids = ranks_of(process)
    assert len(pids) == 2
    process.kill()
    finish(process)
    all_gone(pids)


def other_than(process: "subprocess.Popen[str]", known: list[int]) -> int:
    """Waits for a new child."""
    deadline = time.monotonic() + 60
    while not set(ranks_of(process)) - set(known):
        assert time.monotonic() < deadline, "no standby is started"
        time.sleep(0.01)
    return (set(ranks_of(process)) - set(known)).pop()


@pytest.mark.parametrize("signum", [signal.SIGINT, pytest.param(signal.SIGTERM, marks=pytest.mark.combinations)])
def test_a_signal_ends_all(signum: signal.Signals) -> None:
    process = start("wait", 1, STANDBY="1")
    wait_for(process, "waiting")
    if signum is signal.SIGINT:
        pids = ranks_of(process)
        lost = other_than(process, pids[:2])
        os.kill(lost, signal.SIGKILL)  # a standby that dies while it waits is replaced, and nobody hears of it
        pids = [*pids[:2], lost, other_than(process, [*pids, lost])]
        os.killpg(process.pid, signum)  # as Ctrl-C does
    else:
        pids = ranks_of(process)
        process.send_signal(signum)
    output = finish(process)
    assert process.returncode == 128 + signum, output
    assert f"The run was stopped by {signum.name}" in output
    assert "died" not in output
    assert "Traceback" not in output, output  # it was asked for
    all_gone(pids)


def test_another_launcher_that_says_too_little() -> None:
    process = start("none", 0, LOCAL_RANK="0")
    output = finish(process)
    assert process.returncode == 1
    assert "LOCAL_RANK=0 is set, so another launcher has started this process, but MASTER_ADDR and" in output


def test_without_a_script() -> None:
    """Each in a process of its own, all at once."""
    fit = "L.Trainer(strategy='replica_zero', accelerator='cpu', devices=2, logger=False).fit(BoringModel())"
    model = "from lightning.pytorch.demos.boring_classes import BoringModel"
    code = f"import lightning as L, lightning_replica\n{model}\n{fit}"
    cases = [
        (["-c", code], "", "came from `python -c` or standard input"),
        (["-"], code, "came from `python -c` or standard input"),
        (["-i"], code + "\n", "an interactive session or a notebook has no script"),
    ]
    processes = [
        subprocess.Popen(
            [sys.executable, "-W", "ignore", *options],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for options, _, _ in cases
    ]
    for process, (_, typed, message) in zip(processes, cases, strict=True):
        output, _ = process.communicate(typed, timeout=200)
        assert message in output


def in_terminal(*line: str, **environment: str) -> tuple["subprocess.Popen[bytes]", int]:
    """Start a program with a terminal of its own; return it with the terminal's other end."""
    own, its = pty.openpty()
    process = subprocess.Popen(
        line,
        stdin=its,
        stdout=its,
        stderr=its,
        env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONWARNINGS": "ignore", **environment},
        start_new_session=True,
        preexec_fn=lambda: fcntl.ioctl(0, termios.TIOCSCTTY, 0),
    )
    os.close(its)
    return process, own


def read_until(terminal: int, text: str) -> None:
    said = b""
    while text.encode() not in said:
        said += os.read(terminal, 2**16)  # an error once all programs at this terminal have ended


def test_a_terminal_that_closes(tmp_path: Path) -> None:
    """It sends SIGHUP to the supervisor and to all ranks, as its shell does again, and nobody can print any more."""
    line = (sys.executable, "-W", "ignore", str(SCRIPT), "wait", "1")
    process, terminal = in_terminal(*line, GASP=str(tmp_path), STANDBY="1")
    try:
        read_until(terminal, "waiting")
        pids = ranks_of(process)
        os.close(terminal)
        process.send_signal(signal.SIGHUP)
        assert process.wait(100) == GASP_WRITTEN
        path = CheckpointDirectory(tmp_path).latest(verify=True).path
        assert path is not None
        assert path.name in ("step_00000002", "step_00000003")  # before or after the update
        all_gone(pids)
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)


def test_a_closed_terminal_means_nothing_under_nohup() -> None:
    process = start("wait", 1, ("nohup",))
    wait_for(process, "waiting")
    os.killpg(process.pid, signal.SIGHUP)
    process.send_signal(signal.SIGTERM)
    output = finish(process)
    assert process.returncode == 128 + signal.SIGTERM, output


def test_ctrl_c_means_nothing_to_a_process_that_was_started_to_ignore_it() -> None:
    """As a script in the background of another is. Its ranks ignore it too."""
    process = start("wait", 1, ("sh", "-c", 'trap "" INT; exec "$@"', "sh"))
    wait_for(process, "waiting")
    os.killpg(process.pid, signal.SIGINT)
    process.send_signal(signal.SIGTERM)
    output = finish(process)
    assert process.returncode == 128 + signal.SIGTERM, output
    assert "SIGINT" not in output


def test_a_script_that_goes_to_another_directory(tmp_path: Path) -> None:
    """Its ranks begin where it has begun, and go there themselves."""
    (tmp_path / "job" / "out").mkdir(parents=True)
    (tmp_path / "job" / "train.py").write_text(
        "import os, lightning_replica\nos.chdir('out')\n" + TRAINS + "print('rank in', os.getcwd())\n"
    )
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "train.py"],
        cwd=tmp_path / "job",
        capture_output=True,
        text=True,
        timeout=200,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.count(str(tmp_path / "job" / "out")) == 2, done.stdout  # lines of two processes may be mixed


def test_a_directory_that_is_run_as_a_script(tmp_path: Path) -> None:
    (tmp_path / "job").mkdir()
    (tmp_path / "job" / "__main__.py").write_text("import lightning_replica\n" + TRAINS)
    line = [sys.executable, "-W", "ignore", "job"]
    done = subprocess.run(line, cwd=tmp_path, capture_output=True, text=True, timeout=200)
    assert done.returncode == 1
    assert "'job' is a directory or an archive. Name the script itself" in done.stderr


TRAINS = """
import lightning as L
from lightning.pytorch.demos.boring_classes import BoringModel

L.Trainer(
    strategy="replica_zero", accelerator="cpu", devices=2, max_steps=1, logger=False, enable_checkpointing=False,
    enable_progress_bar=False,
).fit(BoringModel())
"""
