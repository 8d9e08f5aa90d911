"""Turns the process that the user started into the supervisor, and the ones that it starts into ranks."""

import sys
from collections.abc import Callable, Mapping
from typing import Any, NoReturn

from lightning.pytorch.callbacks import RichProgressBar

from lightning_replica._compat.lightning import _Launcher, _set_num_threads_if_needed, rerun_command
from lightning_replica.exit_codes import GASP_WRITTEN, NOTHING_SAVED
from lightning_replica.launch.arguments import FillIn
from lightning_replica.launch.environment import RankEnvironment
from lightning_replica.launch.orphans import die_with
from lightning_replica.launch.rank import enter
from lightning_replica.launch.standby import Standbys
from lightning_replica.launch.supervisor import Supervisor, start_script
from lightning_replica.launch.told import Told
from lightning_replica.messages import leave_room, say
from lightning_replica.recovery.options import RecoveryOptions


def supervise(world_size: int, options: RecoveryOptions, notes: Mapping[str, str]) -> NoReturn:
    """Make this process the supervisor of ``world_size`` ranks, each a re-run of the script, and end with them.

    Lightning's own launcher makes the first process rank 0 as well, so that nothing survives the death of rank 0.

    Args:
        world_size: Number of ranks.
        options: What the strategy's arguments say about recovery; ranks tell what callbacks add to that.
        notes: What ranks find in the store.

    Raises:
        SystemExit: Once all ranks have ended, with their exit code.
        ConfigurationError: If there is no script to run again.
    """
    standbys = Standbys(rerun_command, options.standby)
    start = start_script(rerun_command)
    sys.exit(Supervisor(start, world_size, options, say, standbys=standbys, asks=True, notes=notes).run())


class RankLauncher(_Launcher):
    """What a rank launches runs in its own process: the supervisor has launched that.

    Args:
        environment: What the supervisor has told this rank.
        world_size: Number of ranks.
        options_for: What a trainer's user has chosen about recovery.
        fill_in: Completes the arguments of what is launched.
    """

    def __init__(
        self,
        environment: RankEnvironment,
        world_size: int,
        options_for: Callable[[Any], RecoveryOptions],
        fill_in: FillIn,
    ) -> None:
        self._environment, self._world_size = environment, world_size
        self._options_for, self._fill_in = options_for, fill_in
        enter()

    @property
    def is_interactive_compatible(self) -> bool:
        """Notebooks have no script to run again."""
        return False

    def launch(self, function: Callable[..., Any], *args: Any, trainer: Any = None, **kwargs: Any) -> Any:
        """Calls ``function``.

        Raises:
            ConfigurationError: If callbacks contradict the strategy.
        """
        die_with(self._environment.supervisor)
        room = 0 if trainer is None else sum(isinstance(each, RichProgressBar) for each in trainer.callbacks)
        leave_room(room)
        Told(self._options_for(trainer), _local_root(trainer), room).tell(self._environment.connect())
        bound = self._fill_in(trainer, function, args, kwargs)
        _set_num_threads_if_needed(num_processes=self._world_size)
        try:
            return function(*bound.args, **bound.kwargs)
        except SystemExit as ends:  # which no hook of the interpreter sees
            _leave_word(ends)
            raise

    def kill(self, signum: Any) -> None:
        """Called by Lightning's signal handlers inside a rank: a rank has no children to end."""


def _leave_word(ends: SystemExit) -> None:
    rank = enter()
    if rank is not None and ends.code not in (None, 0, GASP_WRITTEN, NOTHING_SAVED):
        rank.ends(ends)


def _local_root(trainer: Any) -> str:
    """The trainer's ``default_root_dir``; where that is remote, the working directory."""
    root = "" if trainer is None else str(trainer.default_root_dir)
    return "" if "://" in root else root
