"""Whether a run that has ended is worth starting again.

Ranks write down where the run's checkpoints are and at which step it has ended. Whoever ends last counts: the
supervisor, or under another launcher the rank that has published the last checkpoint. A run that was told to end has
not failed, wherever it stood: it does not count, however often that happens.
"""

import logging
from collections.abc import Callable

from lightning_replica.checkpoint.directory import CheckpointDirectory
from lightning_replica.checkpoint.failures import Failures
from lightning_replica.errors import CheckpointError
from lightning_replica.exit_codes import GASP_WRITTEN, NO_PROGRESS
from lightning_replica.messages import say as say_here
from lightning_replica.recovery.generation import Generations, Store

log = logging.getLogger(__name__)

ENOUGH = 3  # failures in a row at one step
_WHERE, _STEP, _LAST_STEP, _COUNTED, _CODE = (
    f"ending/{name}" for name in ("where", "step/{}", "last_step", "counted", "code")
)


class Ending:
    """What is known of how a run ends.

    Args:
        store: Shared by all of its processes.
        world_size: Ranks.
        supervised: Whether a supervisor will judge.
    """

    def __init__(self, store: Store, world_size: int, supervised: bool = True) -> None:
        self._store, self._world_size, self._supervised = store, world_size, supervised

    def leave_directory(self, path: str) -> None:
        """Say where the run's checkpoints are; the first to say so counts."""
        self._store.compare_set(_WHERE, "", path)

    def leave_step(self, rank: int, step: int) -> None:
        """Say at which step a rank was when it could not go on."""
        self._store.set(_STEP.format(rank), str(step))

    def has_gasped(self, step: int) -> None:
        """Say that the last checkpoint, of ``step``, is published. Called on one rank."""
        self._store.set(_LAST_STEP, str(step))
        if not self._supervised:
            self.judge(GASP_WRITTEN, True, say_here)

    def code(self, otherwise: int) -> int:
        """Return what `judge` has returned in whatever process; ``otherwise`` if nobody has judged."""
        return int(self._store.get(_CODE)) if self._store.check([_CODE]) else otherwise

    def judge(self, code: int, fitting: bool, say: Callable[[str], None]) -> int:
        """Count this run, once, if it has failed.

        Args:
            code: The exit code that it would end with.
            fitting: Whether it has ended in the middle of training.
            say: Tells the user something.

        Returns:
            The code to end with: ``code``, or `NO_PROGRESS` if this run failed where those before it have.
        """
        if not self._store.check([_WHERE]) or self._store.add(_COUNTED, 1) > 1:
            return self.code(code)
        generations, where = Generations(self._store), self._store.get(_WHERE).decode()
        try:
            if code == 0:
                Failures(where).forget()
            elif generations.was_asked():
                Failures(where).forget_before(self._ended_at() or 0)
            elif fitting:
                code = self._count(where, code, generations.verdict() or "", say)
        except (CheckpointError, OSError) as error:
            log.warning("How often runs have failed is not counted: %s", error)
        self._store.set(_CODE, str(code))
        return code

    def _count(self, where: str, code: int, why: str, say: Callable[[str], None]) -> int:
        failures, step = Failures(where), self._ended_at()
        if step is None:  # nobody was left to say; where the next run would begin
            newest = CheckpointDirectory(where).latest().manifest
            step = 0 if newest is None else newest.step or 0
        count = failures.add(step, why)
        if count < ENOUGH:
            return code
        say(
            f"{count} runs in a row have failed at step {step}, so another would too (exit code {NO_PROGRESS}). Look at"
            " what this step trains on, and at the first error above. Once that is mended, start the same command"
            f" again; {failures.file} counts from 1 as soon as a run comes further."
        )
        return NO_PROGRESS

    def _ended_at(self) -> int | None:
        """That of the last checkpoint; else the last at which a rank has given up. None if nobody was left to say."""
        if self._store.check([_LAST_STEP]):
            return int(self._store.get(_LAST_STEP))
        keys = [key for key in map(_STEP.format, range(self._world_size)) if self._store.check([key])]
        return max((int(self._store.get(key)) for key in keys), default=None)
