"""The third level of recovery: a process died or hangs, and another takes its place."""

from lightning_replica.callbacks.level import Level
from lightning_replica.core.options import RecoveryOptions


class RankReplacement(Level):
    """Sets up the third level of recovery, replacement: a new process takes the place of one that died or hung.

    Args:
        max_restarts: Number of processes that may be replaced in one run.
        standby: Number of started processes that wait to become replacements.
        hang_min_s: Shortest time without progress that counts as a hang, in seconds.
        hang_max_s: Longest such time, in seconds.
        rendezvous_timeout_s: How long ranks wait for a replacement to come, in seconds.
    """

    def __init__(
        self,
        max_restarts: int = RecoveryOptions.max_restarts,
        standby: int = RecoveryOptions.standby,
        hang_min_s: float = RecoveryOptions.hang_min_s,
        hang_max_s: float = RecoveryOptions.hang_max_s,
        rendezvous_timeout_s: float = RecoveryOptions.rendezvous_timeout_s,
    ) -> None:
        super().__init__(
            {
                "max_restarts": max_restarts,
                "standby": standby,
                "hang_min_s": hang_min_s,
                "hang_max_s": hang_max_s,
                "rendezvous_timeout_s": rendezvous_timeout_s,
            }
        )
