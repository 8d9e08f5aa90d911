"""Periodic checkpoints of a run, and the tracker that names the newest."""

from pathlib import Path
from typing import Any

from lightning_replica._compat.lightning_names import Checkpoint, pl
from lightning_replica.callbacks.run_directory import RunDirectory
from lightning_replica.core import checks
from lightning_replica.core.messages import warn
from lightning_replica.errors import CheckpointError


class CheckpointPublisher(RunDirectory, Checkpoint):  # Lightning calls `Checkpoint` callbacks last
    """Maintains the directory of a run's checkpoints: writes checkpoints, names the newest, removes old ones.

    The tracker ``latest`` names every sharded checkpoint in the directory as soon as it is complete, also those of a
    `ModelCheckpoint` and of a dying gasp.

    Args:
        dirpath: The directory, or its URL ("s3://bucket/run").
        every_n_train_steps: Write a checkpoint each time this number of optimizer steps is done; None writes none.
        keep_last: How many checkpoints named ``step_...`` to keep, of this fit and of the runs that it goes on from;
            None keeps all. Those of other runs and fits stay, and the tracked one.
        async_save: Whether training continues while a checkpoint is written to the disk. Training still waits for a
            copy of what is written, which takes memory for the shard and its part of the weights. It also waits for a
            checkpoint that is still under way when the next is due, or at the end. If a rank is lost before a
            checkpoint is complete, that checkpoint is written again after the recovery.
        must_save: Whether a checkpoint that cannot be written (a full disk, a store that is down) ends the run.
            Otherwise the run warns, keeps the existing checkpoints, and tries again when the next is due.

    Raises:
        ConfigurationError: If a value is invalid; at the start of ``fit``, if the directory cannot be written to or
            the trainer has another strategy.
        CheckpointError: With ``must_save``, on every rank, if a checkpoint cannot be written.
    """

    def __init__(
        self,
        dirpath: str | Path,
        every_n_train_steps: int | None = None,
        keep_last: int | None = None,
        async_save: bool = False,
        must_save: bool = False,
    ) -> None:
        super().__init__(dirpath, keep_last)
        given = {"every_n_train_steps": every_n_train_steps, "keep_last": keep_last}
        checks.whole(1, **{name: value for name, value in given.items() if value is not None})
        checks.choice("async_save", async_save, (True, False))
        checks.choice("must_save", must_save, (True, False))
        self._every, self._saved, self._async, self._must = every_n_train_steps, 0, async_save, must_save
        self._under_way: int | None = None  # the step of a checkpoint that may not be complete yet
        self._look = False  # whether to check what became of it, because the world has rolled back meanwhile

    def on_fit_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Prepare the directory, and count the current step as saved."""
        super().on_fit_start(trainer, pl_module)
        self._saved = trainer.global_step

    def on_train_batch_end(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Write a checkpoint if one is due at this step, or if the last one was not completed."""
        step = trainer.global_step
        due = self._every is not None and step != self._saved and step % self._every == 0
        missing = (due or self._look) and not self._settle(trainer, "Another is written now.")
        self._look = False
        if due or missing:
            self._saved = step
            self._save(trainer, asynchronous=self._async and not missing, then=self._next(step))

    def on_train_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Wait for a checkpoint that is under way; write it again if it was not completed."""
        if not self._settle(trainer, "The save is tried once more."):
            self._save(trainer, asynchronous=False, then="This was the last checkpoint of this run.")

    def _save(self, trainer: pl.Trainer, asynchronous: bool, then: str) -> None:
        checkpoints, path = self._run_checkpoints(trainer), self.directory.path_of(trainer.global_step)
        step, self._under_way = trainer.global_step, None
        try:
            (checkpoints.save_async if asynchronous else checkpoints.save)(path)
        except CheckpointError as error:  # raised on every rank
            self._bear(trainer, step, error, then)
        else:
            self._under_way = step if asynchronous else None

    def _settle(self, trainer: pl.Trainer, then: str) -> bool:
        """Wait until no checkpoint is under way; return whether none is missing."""
        step, self._under_way = self._under_way, None
        if step is None:
            return True
        try:
            return self._run_checkpoints(trainer).settle(self.directory.path_of(step))
        except CheckpointError as error:  # raised on every rank
            self._bear(trainer, step, error, then)
            return False

    def _bear(self, trainer: pl.Trainer, step: int, error: CheckpointError, then: str) -> None:
        """Say that the checkpoint of ``step`` could not be written; raise ``error`` if that ends the run."""
        if self._must:
            raise error
        if trainer.is_global_zero:
            warn(
                f"the checkpoint of step {step} could not be written: {error} Training continues, and whole"
                f" checkpoints stay. {then} (`CheckpointPublisher(must_save=True)` would end the run.)"
            )

    def _next(self, step: int) -> str:
        if self._every is None:
            return "Make sure that the next one can be written."
        return f"The next is due at step {step - step % self._every + self._every}: make sure that it can be written."

    def state_dict(self) -> dict[str, Any]:
        """Return the step of the last save, and that of a checkpoint that may not be complete yet."""
        return {"saved": self._saved, "under_way": self._under_way}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restore what `state_dict` returned."""
        self._saved, self._under_way = state_dict["saved"], state_dict["under_way"]
        self._look = self._under_way is not None
