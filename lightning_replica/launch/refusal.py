"""Refuses to start ranks where there is a script, but running it again would not start ranks."""

import sys
from collections.abc import Callable
from typing import Any

from lightning_replica._compat.lightning_names import _Launcher
from lightning_replica.errors import ConfigurationError

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
