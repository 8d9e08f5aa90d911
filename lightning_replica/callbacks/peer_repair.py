"""The second level: a process is there, but its shard is not what it was."""

from lightning_replica.callbacks.level import Level
from lightning_replica.recovery.options import GuardMode, RecoveryOptions


class PeerRepair(Level):
    """Sets up the second level of recovery, repair: a rank that is alive takes its shard from a peer.

    Args:
        guard: How much of a shard is looked at for wrong bits in every step: "sampled" is a rolling part, "full" all
            of it, "off" nothing.
    """

    def __init__(self, guard: GuardMode = RecoveryOptions.guard) -> None:
        super().__init__({"guard": guard})
