"""Turns the process that the user started into the supervisor."""

import ctypes
import os
import signal
import sys
from collections.abc import Callable
from typing import Any

from lightning_replica._compat.lightning import _Launcher, _set_num_threads_if_needed, rerun_command
from lightning_replica.errors import ConfigurationError
from lightning_replica.launch.environment import RankEnvironment
from lightning_replica.launch.supervisor import Supervisor, start_script
from lightning_replica.messages import say

ORPHANED = 70  # exit code of a rank whose supervisor is gone
_PR_SET_PDEATHSIG = 1


class SupervisorLauncher(_Launcher):
    """``python train.py`` becomes the supervisor; every rank, rank 0 too, is a re-run of the script.

    Lightning's own launcher makes the first process rank 0 as well, so that nothing survives the death of rank 0.

    Args:
        world_size: Number of ranks.
        max_restarts: Processes that may be replaced before the run is given up.
    """

    def __init__(self, world_size: int, max_restarts: int) -> None:
        self._world_size, self._max_restarts = world_size, max_restarts

    @property
    def is_interactive_compatible(self) -> bool:
        """Notebooks have no script to run again."""
        return False

    def launch(self, function: Callable[..., Any], *args: Any, trainer: Any = None, **kwargs: Any) -> Any:
        """Supervises, and does not return; in a rank, calls ``function``.

        Raises:
            SystemExit: In the supervisor, once all ranks have ended, with their exit code.
        """
        environment = RankEnvironment.current()
        if environment is not None:
            die_with(environment.supervisor)
            _set_num_threads_if_needed(num_processes=self._world_size)
            return function(*args, **kwargs)
        supervisor = Supervisor(start_script(rerun_command), self._world_size, self._max_restarts, say)
        code = supervisor.run()
        _disarm(trainer)
        sys.exit(code)

    def kill(self, signum: Any) -> None:
        """Called by Lightning's signal handlers inside a rank: a rank has no children to end."""


def die_with(supervisor: int) -> None:
    """Ends this process when ``supervisor`` ends, as far as the platform can; the monitor does the rest."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != supervisor:
        sys.exit(ORPHANED)


def _disarm(trainer: Any) -> None:
    """Keeps Lightning from treating the supervisor's exit as a failed training: it has not trained."""
    if trainer is not None:
        trainer.callbacks, trainer.loggers, trainer.datamodule = [], [], None
