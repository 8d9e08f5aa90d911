"""``python script.py`` without the seconds that Python takes to import torch and Lightning.

A process forked from one that has imported them becomes the script: same command line, directory, environment, output,
``__main__``. Pythons that the script starts are forked in the same way. Tests of how a job starts start real ones.
"""

import os
import runpy
import signal
import subprocess
import sys
import warnings
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from multiprocessing import process, spawn
from pathlib import Path
from typing import Any

import torch
from lightning.fabric.utilities.rank_zero import _get_rank
from lightning.pytorch.utilities.rank_zero import rank_zero_only

from lightning_replica._compat import started
from lightning_replica.launch.rank import enter
from tests.support.forked import ForkedProcess

_START = subprocess.Popen


class ForkedPython(ForkedProcess):
    """A Python that runs a script; what users of `subprocess.Popen` see of it."""

    def __init__(self, line: list[str], cwd: str, environment: dict[str, str], output: str, group: int = 0) -> None:
        super().__init__(environment, Path(output), _run, line, cwd, output, group)

    def poll(self) -> int | None:
        if self._process.exitcode is not None:
            self.wait()
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        if timeout is not None:
            self._process.join(timeout)
            if self._process.exitcode is None:
                raise subprocess.TimeoutExpired("script", timeout)
        return super().wait()

    def kill(self) -> None:
        self.send_signal(9)


def run(
    line: list[str], cwd: Path, environment: dict[str, str], output: Path, timeout: float
) -> "subprocess.CompletedProcess[str]":
    """Runs ``python script.py ...`` to its end, as `subprocess.run` would; it writes to ``output``."""
    process = ForkedPython(line, str(cwd), environment, str(output))
    try:
        code = process.wait(timeout)
    finally:
        with suppress(ProcessLookupError):  # whatever is left of it
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
    return subprocess.CompletedProcess(line, code, output.read_text(errors="replace"))


@contextmanager
def scripts_are_forked() -> Iterator[None]:
    """Inside, scripts that the tested code starts with `subprocess.Popen` are forked."""

    def start(command: list[str], env: dict[str, str], stdout: Any, **_: Any) -> ForkedPython:
        return ForkedPython(list(command), os.getcwd(), dict(env), stdout.name)

    subprocess.Popen = start  # type: ignore[assignment, misc]
    try:
        yield
    finally:
        subprocess.Popen = _START  # type: ignore[misc]


def _run(line: list[str], cwd: str, output: str, group: int) -> None:
    os.setpgid(0, group)
    os.chdir(cwd)
    started.DIRECTORY = cwd  # as if the package were imported here
    if group == 0:  # the first of a run; `forked` tells every process that it is a rank
        del os.environ["LIGHTNING_REPLICA_SUPERVISOR"]
    sys.argv, sys.orig_argv = line[1:], line
    sys.path[0:0] = [str(Path(line[1]).parent), *os.environ.get("PYTHONPATH", "").split(os.pathsep)]
    _forget_main()
    setattr(process, "_parent_process", None)  # noqa: B010  # the user has started it
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    setattr(rank_zero_only, "rank", _get_rank() or 0)  # noqa: B010  # as importing Lightning does

    def start(command: Any, *args: Any, **kwargs: Any) -> Any:
        if list(command)[:2] != line[:2]:
            return _START(command, *args, **kwargs)
        environment = dict(kwargs.get("env") or os.environ)
        return ForkedPython(list(command), kwargs.get("cwd") or os.getcwd(), environment, output, os.getpgid(0))

    subprocess.Popen = start  # type: ignore[assignment, misc]
    enter()  # as importing the package does, which was imported before the fork
    runpy.run_path(line[1], run_name="__main__")


def _forget_main() -> None:
    """Keeps multiprocessing from importing the script a second time in what is forked from here."""
    prepare = spawn.get_preparation_data

    def without_main(name: str) -> dict[str, Any]:
        return {key: value for key, value in prepare(name).items() if not key.startswith("init_main")}

    spawn.get_preparation_data = without_main


__all__ = ["ForkedPython", "run", "scripts_are_forked"]
