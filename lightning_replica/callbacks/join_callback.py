"""The base class for what a project does where ranks have different numbers of batches."""

from lightning_replica._compat.lightning_names import Callback, pl


class JoinCallback(Callback):
    """Base class with the hooks of ``uneven_inputs="join"``, which stand for those of torch's ``JoinHook``."""

    def on_shadow_step(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Do what goes with a batch that this rank does not have, as ``JoinHook.main_hook`` does.

        Called on ranks without inputs, once for each batch that other ranks have, after its step. Other ranks call
        ``on_train_batch_end`` at that time. A collective that they call there must be called here, too.
        """

    def on_join_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule, is_last_joiner: bool) -> None:
        """Do what comes after the last batch of an epoch, as ``JoinHook.post_hook`` does. Called on all ranks.

        Args:
            trainer: The trainer.
            pl_module: The module.
            is_last_joiner: Whether this rank is one of those that had the last batch.
        """
