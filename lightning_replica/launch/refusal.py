"""Refuses to start ranks where there is a script, but running it again would not start ranks."""

import multiprocessing
import os
import sys
import threading
from collections.abc import Callable
from typing import Any

import psutil

from lightning_replica._compat.lightning_names import _Launcher
from lightning_replica.errors import ConfigurationError
from lightning_replica.launch.environment import RankEnvironment

_TESTS = ("_pytest", "unittest")


def called_by_tests() -> str:
    """Return which test runner has called this; empty if none has.

    The stack shows this. The environment cannot, as the scripts that a test starts inherit it.
    """
    frame = sys._getframe()
    while frame is not None:
        package = str(frame.f_globals.get("__name__", "")).partition(".")[0]
        if package in _TESTS:
            return package.lstrip("_")
        frame = frame.f_back  # type: ignore[assignment]
    return ""


def refuse_threads() -> None:
    """Check that this is the main thread.

    Raises:
        ConfigurationError: If it is not. Signals reach the main thread only, and ranks end with the thread that has
            started them.
    """
    if threading.current_thread() is not threading.main_thread():
        raise ConfigurationError(
            f"`replica_zero` trains in the main thread only, and this trainer was made in the thread"
            f" {threading.current_thread().name!r}. Put the training into a script of its own and start that:"
            ' `subprocess.run([sys.executable, "train.py"], check=True)`.'
        )


def refuse_children() -> None:
    """Check that this process is the one that runs the script.

    Raises:
        ConfigurationError: If the script has started it, as `multiprocessing` does: ranks would run the whole script.
    """
    if multiprocessing.parent_process() is not None:
        raise ConfigurationError(
            "`replica_zero` starts its ranks by running the script again, but this trainer was made in a process that"
            f" the script has started, {multiprocessing.current_process().name!r}: every rank would start one too."
            " Make the trainer in the script itself, or put the training into a script of its own and start that:"
            ' `subprocess.run([sys.executable, "train.py"], check=True)`.'
        )


def refuse_grandchildren(environment: RankEnvironment) -> None:
    """Check that a process with the environment of a rank was started by the supervisor.

    Raises:
        ConfigurationError: If another process has started it, such as a rank, whose environment it has inherited.
    """
    supervisor = environment.supervisor
    if os.getppid() != supervisor and psutil.pid_exists(supervisor):
        raise ConfigurationError(
            f"This process has the environment of a rank, but was not started by the supervisor, process {supervisor}."
            " A rank may have started it. Only ranks themselves can train together. To train here apart from them,"
            " remove from its environment what the supervisor has set: the variables that begin with"
            " LIGHTNING_REPLICA_, and LOCAL_RANK, NODE_RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT."
        )


class RefusingLauncher(_Launcher):
    """Refuses to launch in a process that runs tests, where every rank would run the whole session.

    Args:
        runner: Name of the test runner.
    """

    def __init__(self, runner: str) -> None:
        self._runner = runner

    @property
    def is_interactive_compatible(self) -> bool:
        """Whether this works in a notebook: it does not, as it launches nothing."""
        return False

    def launch(self, function: Callable[..., Any], *args: Any, trainer: Any = None, **kwargs: Any) -> Any:
        """Refuse to launch.

        Raises:
            ConfigurationError: Always.
        """
        raise ConfigurationError(
            f"`replica_zero` starts its ranks by running the script again, but here the script is the whole session of"
            f" {self._runner}. Put the training into a script and have the test run it:"
            ' `subprocess.run([sys.executable, "train.py"], check=True)`. A test that needs no faults may train with'
            ' `strategy="auto", devices=1`.'
        )

    def kill(self, signum: Any) -> None:
        """Do nothing: there is nothing to end."""
