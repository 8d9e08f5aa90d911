"""The second level of recovery: a process is alive, but its shard is lost or wrong."""

from lightning_replica.callbacks.level import Level
from lightning_replica.core.digests import GuardMode
from lightning_replica.core.options import RecoveryOptions


class PeerRepair(Level):
    """Sets up the second level of recovery, repair: a rank that is alive takes its shard from a peer.

    Args:
        guard: How much of a shard is checked for wrong bits in every step: "sampled" is a rolling part, "full" all of
            it, "off" nothing.
    """

    def __init__(self, guard: GuardMode = RecoveryOptions.guard) -> None:
        super().__init__({"guard": guard})
