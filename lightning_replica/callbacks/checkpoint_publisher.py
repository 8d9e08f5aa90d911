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
        dirpath: The directory, or its URL ("s3://bucket/run").
        every_n_train_steps: Write a checkpoint whenever so many optimizer steps are done; None writes none.
        keep_last: How many checkpoints named ``step_...`` stay; None keeps all. The tracked one always stays.
        async_save: Whether training goes on while a checkpoint goes to the disk. It waits for a copy of what is
            written, which takes memory for the shard and its part of the weights, and for a checkpoint that is still
            under way when the next is due, or at the end. One that loses a rank before it is whole is written anew
            after the recovery.

    Raises:
        ConfigurationError: If a value makes no sense; at the start of ``fit``, if the directory cannot be written to
            or the strategy is another.
    """

    def __init__(
        self,
        dirpath: str | Path,
        every_n_train_steps: int | None = None,
        keep_last: int | None = None,
        async_save: bool = False,
    ) -> None:
        super().__init__(dirpath, keep_last)
        given = {"every_n_train_steps": every_n_train_steps, "keep_last": keep_last}
        checks.whole(1, **{name: value for name, value in given.items() if value is not None})
        checks.choice("async_save", async_save, (True, False))
        self._every, self._saved, self._async = every_n_train_steps, 0, async_save
        self._under_way: int | None = None  # the step of a checkpoint that may not be whole yet
        self._look = False  # at what has become of it: the world has gone back meanwhile

    def on_fit_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """What is saved counts from here."""
        super().on_fit_start(trainer, pl_module)
        self._saved = trainer.global_step

    def on_train_batch_end(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Writes where a step's end is due."""
        step = trainer.global_step
        due = self._every is not None and step != self._saved and step % self._every == 0
        missing = (due or self._look) and not self._settle(trainer)
        self._look = False
        if due or missing:
            self._saved = step
            self._save(trainer, beside=self._async and not missing)

    def on_train_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Waits for what is under way."""
        if not self._settle(trainer):
            self._save(trainer, beside=False)

    def _save(self, trainer: pl.Trainer, beside: bool) -> None:
        strategy: Any = trainer.strategy
        step = trainer.global_step
        (strategy.save_beside if beside else strategy.save_periodic)(self.directory.path_of(step))
        self._under_way = step if beside else None

    def _settle(self, trainer: pl.Trainer) -> bool:
        """Whether nothing is missing, once nothing is under way any more."""
        if self._under_way is None:
            return True
        strategy: Any = trainer.strategy
        whole: bool = strategy.settle_save(self.directory.path_of(self._under_way))
        self._under_way = None
        return whole

    def state_dict(self) -> dict[str, Any]:
        """When it has saved last, and what may not be whole yet."""
        return {"saved": self._saved, "under_way": self._under_way}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """The inverse of `state_dict`."""
        self._saved, self._under_way = state_dict["saved"], state_dict["under_way"]
        self._look = self._under_way is not None
