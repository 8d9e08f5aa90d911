"""The base class for whatever a project wants to do while a recovery goes on."""

import lightning.pytorch as pl
from lightning.pytorch.callbacks import Callback

from lightning_replica.recovery.context import RecoveryContext
from lightning_replica.recovery.incident import Incident


class RecoveryCallback(Callback):
    """One hook for each phase of a recovery, called at the end of the phase, on every rank, on replacements too.

    A fault in any phase begins the recovery again, so every hook may be called several times and should not mind.
    From `on_recovery_regroup` on, ``trainer.strategy.broadcast``, ``all_gather`` and ``reduce`` work, and so does
    torch.distributed with its default group; every rank must make the same calls. A hook that raises counts as a failed
    recovery: all ranks begin it again, and after ``max_tries`` times the run ends with an error that names hook and
    rank. Raise `RecoveryError` to end the run at once. Random numbers that a hook draws leave the training's as they
    are.

    A project's own state, taken from a peer::

        class Teacher(RecoveryCallback):
            def on_recovery_repair(self, trainer, pl_module, context):
                if context.replaced:
                    self.seen = trainer.strategy.broadcast(self.seen, src=context.survivors[0])
    """

    def on_recovery_stop(self, trainer: pl.Trainer, pl_module: pl.LightningModule, context: RecoveryContext) -> None:
        """The generation is over; nobody is left in a collective of the package. Stop threads that use the network.

        Here and in `on_recovery_clean` the device is stopped: leave its tensors alone.
        """

    def on_recovery_clean(self, trainer: pl.Trainer, pl_module: pl.LightningModule, context: RecoveryContext) -> None:
        """All process groups are aborted. Let go of whatever else a fault spoils."""

    def on_recovery_regroup(self, trainer: pl.Trainer, pl_module: pl.LightningModule, context: RecoveryContext) -> None:
        """Process groups are open again, those of your own too: every handle that torch has given you stays valid.

        Renew here what a library has opened without torch.distributed, and groups that only some ranks still have.
        """

    def on_recovery_repair(self, trainer: pl.Trainer, pl_module: pl.LightningModule, context: RecoveryContext) -> None:
        """Every rank has its shard. Give replacements (``context.replaced``) what they need of your own state."""

    def on_recovery_rollback(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, context: RecoveryContext
    ) -> None:
        """Weights, loops, callbacks and data are back at ``context.step``. Reset what the step has touched."""

    def on_recovery_resume(self, trainer: pl.Trainer, pl_module: pl.LightningModule, context: RecoveryContext) -> None:
        """Training is about to go on. Start again what `on_recovery_stop` has stopped."""

    def on_incident(self, trainer: pl.Trainer, pl_module: pl.LightningModule, incident: Incident) -> None:
        """An incident is over: the first good step after it is done, or the run is about to end because of it.

        On every rank; ``incident.teller`` is the one to tell the world.
        """
