"""The base class for what a project does during a recovery."""

from lightning_replica._compat.lightning_names import Callback, pl
from lightning_replica.recovery.context import RecoveryContext
from lightning_replica.recovery.incident import Incident


class RecoveryCallback(Callback):
    """Base class with one hook for each phase of a recovery, called at the end of the phase.

    Hooks are called on every rank, replacements included. A fault in any phase starts the recovery again, so a hook
    must allow several calls.
    From `on_recovery_regroup` on, ``trainer.strategy.broadcast``, ``all_gather`` and ``reduce`` work, and so does
    torch.distributed with its default group; every rank must make the same calls. A hook that raises counts as a failed
    recovery: all ranks start it again, and after ``max_tries`` times the run ends with an error that names hook and
    rank. Raise `RecoveryError` to end the run at once. Random numbers that a hook draws do not change those of the
    training.

    In this example a replacement gets a project's own state from a survivor::

        class Teacher(RecoveryCallback):
            def on_recovery_repair(self, trainer, pl_module, context):
                if context.replaced:
                    self.seen = trainer.strategy.broadcast(self.seen, src=context.survivors[0])
    """

    def on_recovery_stop(self, trainer: pl.Trainer, pl_module: pl.LightningModule, context: RecoveryContext) -> None:
        """Stop threads that use the network. The generation is over; no rank is in a collective of the package.

        During this hook and `on_recovery_clean` the device is stopped: do not touch its tensors.
        """

    def on_recovery_clean(self, trainer: pl.Trainer, pl_module: pl.LightningModule, context: RecoveryContext) -> None:
        """Release everything else that a fault makes unusable. All process groups are aborted."""

    def on_recovery_regroup(self, trainer: pl.Trainer, pl_module: pl.LightningModule, context: RecoveryContext) -> None:
        """Renew what a library has opened without torch.distributed, and groups that only some ranks still have.

        All other process groups are open again, your own included: every handle that torch has given you stays valid.
        """

    def on_recovery_repair(self, trainer: pl.Trainer, pl_module: pl.LightningModule, context: RecoveryContext) -> None:
        """Give replacements (``context.replaced``) what they need of your own state. Every rank has its shard."""

    def on_recovery_rollback(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, context: RecoveryContext
    ) -> None:
        """Reset what the step has touched. Weights, loops, callbacks and data are back at ``context.step``."""

    def on_recovery_resume(self, trainer: pl.Trainer, pl_module: pl.LightningModule, context: RecoveryContext) -> None:
        """Restart what `on_recovery_stop` has stopped. Training is about to resume."""

    def on_incident(self, trainer: pl.Trainer, pl_module: pl.LightningModule, incident: Incident) -> None:
        """Handle the end of an incident: the first good step is done, or the run is about to end because of it.

        Called on every rank; the rank ``incident.reporter`` is the one that reports it.
        """
