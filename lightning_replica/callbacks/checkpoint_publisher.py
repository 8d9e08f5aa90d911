"""Periodic checkpoints of a run, and the tracker that names the newest."""

from pathlib import Path
from typing import Any

import lightning.pytorch as pl
from lightning.pytorch.callbacks import Checkpoint

from lightning_replica import checks
from lightning_replica.callbacks.run_directory import RunDirectory


class CheckpointPublisher(RunDirectory, Checkpoint):  # Lightning calls a `Checkpoint` last
    """Keeps the directory of a run's checkpoints: writes them, names the newest, removes the old.

    Every sharded checkpoint that appears in the directory, a `ModelCheckpoint`'s and a dying gasp's too, is named by
    the tracker ``latest`` as soon as it is whole.

    Args:
        dirpath: The directory.
        every_n_train_steps: Write a checkpoint whenever so many optimizer steps are done; None writes none.
        keep_last: How many checkpoints named ``step_...`` stay; None keeps all. The tracked one always stays.

    Raises:
        ConfigurationError: If a value makes no sense; at the start of ``fit``, if the directory cannot be written to
            or the strategy is another.
    """

    def __init__(
        self, dirpath: str | Path, every_n_train_steps: int | None = None, keep_last: int | None = None
    ) -> None:
        super().__init__(dirpath, keep_last)
        given = {"every_n_train_steps": every_n_train_steps, "keep_last": keep_last}
        checks.whole(1, **{name: value for name, value in given.items() if value is not None})
        self._every, self._saved = every_n_train_steps, 0

    def on_fit_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """What is saved counts from here."""
        super().on_fit_start(trainer, pl_module)
        self._saved = trainer.global_step

    def on_train_batch_end(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Writes where a step's end is due."""
        step = trainer.global_step
        if self._every is None or step == self._saved or step % self._every:
            return
        self._saved = step
        strategy: Any = trainer.strategy
        strategy.save_periodic(self.directory.path_of(step))

    def state_dict(self) -> dict[str, Any]:
        """When it has saved last."""
        return {"saved": self._saved}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """The inverse of `state_dict`."""
        self._saved = state_dict["saved"]
