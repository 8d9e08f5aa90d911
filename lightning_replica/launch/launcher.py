"""Turns the process that the user started into the supervisor."""

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from lightning_replica._compat.lightning import _Launcher, _set_num_threads_if_needed, rerun_command
from lightning_replica.launch.arguments import FillIn
from lightning_replica.launch.environment import RankEnvironment
from lightning_replica.launch.orphans import die_with
from lightning_replica.launch.standby import Standbys
from lightning_replica.launch.supervisor import Supervisor, start_script
from lightning_replica.messages import say
from lightning_replica.recovery.options import RecoveryOptions


class SupervisorLauncher(_Launcher):
    """``python train.py`` becomes the supervisor; every rank, rank 0 too, is a re-run of the script.

    Lightning's own launcher makes the first process rank 0 as well, so that nothing survives the death of rank 0.

    Args:
        world_size: Number of ranks.
        options_for: What a trainer's user has chosen about recovery.
        fill_in: Completes the arguments of what is launched; ranks inherit what it leaves in the environment.
    """

    def __init__(self, world_size: int, options_for: Callable[[Any], RecoveryOptions], fill_in: FillIn) -> None:
        self._world_size, self._options_for, self._fill_in = world_size, options_for, fill_in

    @property
    def is_interactive_compatible(self) -> bool:
        """Notebooks have no script to run again."""
        return False

    def launch(self, function: Callable[..., Any], *args: Any, trainer: Any = None, **kwargs: Any) -> Any:
        """Supervises, and does not return; in a rank, calls ``function``.

        Raises:
            SystemExit: In the supervisor, once all ranks have ended, with their exit code.
            ConfigurationError: If there is no script to run again, or callbacks contradict the strategy.
        """
        environment = RankEnvironment.current()
        bound = self._fill_in(trainer, function, args, kwargs)
        if environment is not None:
            die_with(environment.supervisor)
            _set_num_threads_if_needed(num_processes=self._world_size)
            return function(*bound.args, **bound.kwargs)
        options = self._options_for(trainer)
        start, standbys = start_script(rerun_command), Standbys(rerun_command, options.standby)
        supervisor = Supervisor(start, self._world_size, options, say, _local_root(trainer), standbys)
        code = supervisor.run()
        _disarm(trainer)
        sys.exit(code)

    def kill(self, signum: Any) -> None:
        """Called by Lightning's signal handlers inside a rank: a rank has no children to end."""


def _local_root(trainer: Any) -> Path:
    """The trainer's ``default_root_dir``; where that is remote, the working directory."""
    root = "" if trainer is None else str(trainer.default_root_dir)
    return Path() if "://" in root else Path(root)


def _disarm(trainer: Any) -> None:
    """Keeps Lightning from treating the supervisor's exit as a failed training: it has not trained."""
    if trainer is not None:
        trainer.callbacks, trainer.loggers, trainer.datamodule = [], [], None
