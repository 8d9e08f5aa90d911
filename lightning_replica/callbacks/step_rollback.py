"""The first level of recovery: all processes are alive, and the step is done again."""

from lightning_replica.callbacks.level import Level
from lightning_replica.core.options import OnInexact, RecoveryOptions


class StepRollback(Level):
    """Sets up the first level of recovery, retry: no process and no shard is lost, and the step is done again.

    Args:
        max_tries: Number of recoveries at one step before the run ends.
        on_inexact: What follows if something turns out not to be restored exactly: "report" says what, "raise" also
            ends the run.
    """

    def __init__(
        self, max_tries: int = RecoveryOptions.max_tries, on_inexact: OnInexact = RecoveryOptions.on_inexact
    ) -> None:
        super().__init__({"max_tries": max_tries, "on_inexact": on_inexact})
