"""Where ranks cannot be started by running the script again, though there is one."""

import sys
from collections.abc import Callable
from typing import Any

from lightning_replica._compat.lightning import _Launcher
from lightning_replica.errors import ConfigurationError

_TESTS = ("_pytest", "unittest")


def called_by_tests() -> str:
    """Return which test runner has called this; empty if none has.

    The stack says so, not the environment: that is handed on to the scripts that a test starts.
    """
    frame = sys._getframe()
    while frame is not None:
        package = str(frame.f_globals.get("__name__", "")).partition(".")[0]
        if package in _TESTS:
            return package.lstrip("_")
        frame = frame.f_back  # type: ignore[assignment]
    return ""


class RefusingLauncher(_Launcher):
    """Launches nothing in a process that runs tests: every rank would run the whole session.

    Args:
        runner: Who runs the tests.
    """

    def __init__(self, runner: str) -> None:
        self._runner = runner

    @property
    def is_interactive_compatible(self) -> bool:
        """There is nothing to launch."""
        return False

    def launch(self, function: Callable[..., Any], *args: Any, trainer: Any = None, **kwargs: Any) -> Any:
        """Refuse.

        Raises:
            ConfigurationError: Always.
        """
        raise ConfigurationError(
            f"`replica_zero` starts its ranks by running the script again, and here that is the whole session of"
            f" {self._runner}. Put the training into a script and have the test run it:"
            ' `subprocess.run([sys.executable, "train.py"], check=True)`. A test that needs no faults may train with'
            ' `strategy="auto", devices=1`.'
        )

    def kill(self, signum: Any) -> None:
        """There is nothing to end."""
