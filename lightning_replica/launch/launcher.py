"""Turns the process that the user started into the supervisor, and the processes that it starts into ranks."""

import sys
from collections.abc import Callable, Mapping
from typing import Any, NoReturn

from lightning_replica._compat.lightning import ignore_interrupts, rerun_command
from lightning_replica._compat.lightning_names import RichProgressBar, _Launcher, _set_num_threads_if_needed
from lightning_replica.control.trainer_facts import TrainerFacts
from lightning_replica.core import streams
from lightning_replica.core.messages import leave_room, say
from lightning_replica.core.options import RecoveryOptions
from lightning_replica.core.orphans import die_with
from lightning_replica.exit_codes import GASP_WRITTEN, NOTHING_SAVED
from lightning_replica.launch import crashes, stacks
from lightning_replica.launch.arguments import FillIn
from lightning_replica.launch.environment import RankEnvironment
from lightning_replica.launch.node import start_script
from lightning_replica.launch.rank import enter
from lightning_replica.launch.standby import Standbys
from lightning_replica.launch.supervisor import Supervisor
from lightning_replica.stores.secret import make_secret


def supervise(world_size: int, options: RecoveryOptions, notes: Mapping[str, str]) -> NoReturn:
    """Make this process the supervisor of ``world_size`` ranks, each a re-run of the script, and exit when they end.

    Lightning's own launcher also makes the first process rank 0, so nothing survives the death of rank 0.

    Args:
        world_size: Number of ranks.
        options: What the strategy's arguments say about recovery; ranks report what callbacks add to that.
        notes: Entries that the supervisor puts into the store for the ranks.

    Raises:
        SystemExit: Once all ranks have ended, with the exit code of the run.
        ConfigurationError: If there is no script to run again.
    """
    streams.complete()
    make_secret()  # the store is on loopback, which all users of this machine can reach
    standbys = Standbys(rerun_command, options.standby)
    start = start_script(rerun_command)
    streams.flush()  # what the script has printed, before anything that ranks print
    code = Supervisor(start, world_size, options, say, standbys=standbys, expects_facts=True, notes=notes).run()
    streams.flush()
    sys.exit(code)


class RankLauncher(_Launcher):
    """Runs what a rank launches in the rank's own process, which the supervisor has started.

    Args:
        environment: What the supervisor has passed to this rank.
        world_size: Number of ranks.
        options_for: Returns what the user of a trainer has chosen about recovery.
        fill_in: Completes the arguments of the launched function.
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
        """Whether this works in a notebook: it does not, as a notebook has no script to run again."""
        return False

    def launch(self, function: Callable[..., Any], *args: Any, trainer: Any = None, **kwargs: Any) -> Any:
        """Call ``function`` with completed arguments, and return its result.

        Raises:
            ConfigurationError: If callbacks contradict the strategy.
        """
        die_with(self._environment.supervisor)
        room = 0 if trainer is None else sum(isinstance(each, RichProgressBar) for each in trainer.callbacks)
        leave_room(room)
        TrainerFacts(self._options_for(trainer), _local_root(trainer), room).publish(self._environment.connect())
        bound = self._fill_in(trainer, function, args, kwargs)
        _set_num_threads_if_needed(num_processes=self._world_size)
        try:
            return function(*bound.args, **bound.kwargs)
        except KeyboardInterrupt:
            if trainer is not None:
                ignore_interrupts(trainer)
            raise
        except SystemExit as ends:  # no hook of the interpreter sees a SystemExit
            _leave_word(ends)
            raise
        finally:
            stacks.answer_again()
            crashes.write_down_again()

    def kill(self, signum: Any) -> None:
        """Do nothing. Lightning's signal handlers call this inside a rank, which has no children to end."""


def _leave_word(ends: SystemExit) -> None:
    rank = enter()
    if rank is None:
        return
    if ends.code in (None, 0):
        rank.leaves(ends)
    elif ends.code not in (GASP_WRITTEN, NOTHING_SAVED):
        rank.ends(ends)


def _local_root(trainer: Any) -> str:
    """Return the trainer's ``default_root_dir``; empty, for the working directory, if that is remote."""
    root = "" if trainer is None else str(trainer.default_root_dir)
    return "" if "://" in root else root
