"""Whether a run that has ended is worth starting again.

Ranks write to the store where the run's checkpoints are, and at which step the run has ended. One process counts the
run: the supervisor, or under another launcher the rank that has published the last checkpoint. A run that was asked to
end has not failed, wherever it was: it does not count, however often that happens.
"""

import logging
from collections.abc import Callable

from lightning_replica.checkpoint.directory import CheckpointDirectory
from lightning_replica.checkpoint.failures import Failures
from lightning_replica.control import keys
from lightning_replica.control.generation import Generations
from lightning_replica.core.messages import say as say_here
from lightning_replica.errors import CheckpointError
from lightning_replica.exit_codes import GASP_WRITTEN, NO_PROGRESS
from lightning_replica.stores.interface import Store

log = logging.getLogger(__name__)

ENOUGH = 3  # failures in a row at one step


class Ending:
    """The record of how a run ends, in the store.

    Args:
        store: The store that all processes of the run share.
        world_size: Number of ranks.
        supervised: Whether a supervisor calls `judge`.
    """

    def __init__(self, store: Store, world_size: int, supervised: bool = True) -> None:
        self._store, self._world_size, self._supervised = store, world_size, supervised
        self._directory = ""

    def leave_directory(self, path: str) -> None:
        """Record where the run's checkpoints are. Only the first call in a run counts."""
        self._directory = self._directory or path
        self._store.compare_set(keys.ENDING_DIRECTORY, "", self._directory)

    def leave_step(self, rank: int, step: int) -> None:
        """Record the step at which a rank could not continue."""
        self._store.set(keys.ending_step(rank), str(step))

    def has_gasped(self, step: int) -> None:
        """Record that the last checkpoint, of ``step``, is published. One rank calls this."""
        self._store.set(keys.ENDING_LAST_STEP, str(step))
        if self._directory:  # if the first store was lost, it is not in this one
            self.leave_directory(self._directory)
        if not self._supervised:
            self.judge(GASP_WRITTEN, True, say_here)

    def code(self, otherwise: int) -> int:
        """Return what `judge` has returned in any process, or ``otherwise`` if no process has called it."""
        return int(self._store.get(keys.ENDING_CODE)) if self._store.check([keys.ENDING_CODE]) else otherwise

    def judge(self, code: int, fitting: bool, say: Callable[[str], None]) -> int:
        """Count this run if it has failed. All processes together count it once.

        Args:
            code: The exit code that the run would end with.
            fitting: Whether the run has ended in the middle of training.
            say: Prints a message for the user.

        Returns:
            The code to end with: ``code``, or `NO_PROGRESS` if this run failed at the step at which those before it
            failed.
        """
        if not self._store.check([keys.ENDING_DIRECTORY]) or self._store.add(keys.ENDING_COUNTED, 1) > 1:
            return self.code(code)
        generations, where = Generations(self._store), self._store.get(keys.ENDING_DIRECTORY).decode()
        try:
            if code == 0:
                Failures(where).forget()
            elif generations.stop_was_requested():
                Failures(where).forget_before(self._ended_at() or 0)
            elif fitting:
                code = self._count(where, code, generations.verdict() or "", say)
        except (CheckpointError, OSError) as error:
            log.warning("The failed runs cannot be counted: %s", error)
        self._store.set(keys.ENDING_CODE, str(code))
        return code

    def _count(self, where: str, code: int, why: str, say: Callable[[str], None]) -> int:
        failures, step = Failures(where), self._ended_at()
        if step is None:  # no rank was left to record it: take the step at which the next run would begin
            newest = CheckpointDirectory(where).latest().manifest
            step = 0 if newest is None else newest.step or 0
        count = failures.add(step, why)
        if count < ENOUGH:
            return code
        say(
            f"{count} runs in a row have failed at step {step}, so another would too (exit code {NO_PROGRESS}). Look at"
            " the data of this step and at the first error above. Once the problem is fixed, start the same command"
            f" again; {failures.file} counts from 1 again as soon as a run gets further."
        )
        return NO_PROGRESS

    def _ended_at(self) -> int | None:
        """Return the step of the last checkpoint, else the last at which a rank gave up; None if none is recorded."""
        if self._store.check([keys.ENDING_LAST_STEP]):
            return int(self._store.get(keys.ENDING_LAST_STEP))
        steps = [key for key in map(keys.ending_step, range(self._world_size)) if self._store.check([key])]
        return max((int(self._store.get(key)) for key in steps), default=None)
