"""Turns the process that the user started into the supervisor."""

import ctypes
import os
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from lightning_replica._compat.lightning import _Launcher, _set_num_threads_if_needed, rerun_command
from lightning_replica.errors import ConfigurationError
from lightning_replica.launch.environment import RankEnvironment
from lightning_replica.launch.supervisor import Supervisor, start_script
from lightning_replica.messages import say
from lightning_replica.recovery.options import RecoveryOptions

ORPHANED = 70  # exit code of a rank whose supervisor is gone
_PR_SET_PDEATHSIG = 1


class SupervisorLauncher(_Launcher):
    """``python train.py`` becomes the supervisor; every rank, rank 0 too, is a re-run of the script.

    Lightning's own launcher makes the first process rank 0 as well, so that nothing survives the death of rank 0.

    Args:
        world_size: Number of ranks.
        options_for: What a trainer's user has chosen about recovery.
    """

    def __init__(self, world_size: int, options_for: Callable[[Any], RecoveryOptions]) -> None:
        self._world_size, self._options_for = world_size, options_for

    @property
    def is_interactive_compatible(self) -> bool:
        """Notebooks have no script to run again."""
        return False

    def launch(self, function: Callable[..., Any], *args: Any, trainer: Any = None, **kwargs: Any) -> Any:
        """Supervises, and does not return; in a rank, calls ``function``.

        Raises:
            SystemExit: In the supervisor, once all ranks have ended, with their exit code.
            ConfigurationError: If another launcher started this process, or callbacks contradict the strategy.
        """
        environment = RankEnvironment.current()
        if environment is not None:
            die_with(environment.supervisor)
            _set_num_threads_if_needed(num_processes=self._world_size)
            return function(*args, **kwargs)
        if "LOCAL_RANK" in os.environ:
            raise ConfigurationError(
                f"LOCAL_RANK={os.environ['LOCAL_RANK']} is set, so another launcher (torchrun, SLURM ...) started this"
                " process, but `replica_zero` starts and replaces its ranks itself. Run `python train.py` instead."
            )
        options = self._options_for(trainer)
        start = start_script(rerun_command)
        supervisor = Supervisor(start, self._world_size, options, say, _local_root(trainer))
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


def _local_root(trainer: Any) -> Path:
    """The trainer's ``default_root_dir``; where that is remote, the working directory."""
    root = "" if trainer is None else str(trainer.default_root_dir)
    return Path() if "://" in root else Path(root)


def _disarm(trainer: Any) -> None:
    """Keeps Lightning from treating the supervisor's exit as a failed training: it has not trained."""
    if trainer is not None:
        trainer.callbacks, trainer.loggers, trainer.datamodule = [], [], None
