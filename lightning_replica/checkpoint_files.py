"""Checkpoints of a `ModelCheckpoint` keep their names, though the tail in which they are written may be done again.

Lightning gives a checkpoint whose file is there already another name (``-v1``), and later removes that one. So a file
that was written since the snapshot counts as not there: it is written again, with the same contents, in its place.
"""

import os
from collections.abc import Callable, Sequence
from typing import Any

import lightning.pytorch as pl
from lightning.pytorch.callbacks import Callback, ModelCheckpoint

from lightning_replica._compat.lightning import checkpoint_exists
from lightning_replica.recovery.generation import Store
from lightning_replica.recovery.interface import Kind
from lightning_replica.written import Written


class CheckpointFiles:
    """What the checkpoint callbacks of a fit write. Rank 0 knows; the others ask it, as Lightning has them do.

    Args:
        store: Where a replacement finds what was written.
        callbacks: The trainer's.
        newborn: Whether this process is a replacement.
        writes: Whether this is the rank that knows.
    """

    def __init__(self, store: Store, callbacks: Sequence[Callback], newborn: bool, writes: bool) -> None:
        self._written = Written(store, "checkpoints", newborn and writes)
        self._writes = writes
        self._callbacks = [callback for callback in callbacks if isinstance(callback, ModelCheckpoint)]
        for callback in self._callbacks:
            vars(callback)["file_exists"] = self._exists(callback)

    def release(self) -> None:
        """Leave the callbacks alone."""
        for callback in self._callbacks:
            vars(callback).pop("file_exists", None)

    def taken(self, kind: Kind, step: int) -> None:
        """A snapshot is taken."""
        self._written.taken(kind, step)

    def restored(self, kind: Kind, step: int) -> None:
        """This rank goes back to a snapshot."""
        self._written.restored(kind, step)

    def is_written(self, path: str | os.PathLike[str]) -> None:
        """A checkpoint is about to be written; noted before, as the file may be there before anybody can say so."""
        if self._writes:
            self._written.add(os.fspath(path))

    def _exists(self, callback: ModelCheckpoint) -> Callable[[Any, pl.Trainer], bool]:
        def file_exists(filepath: Any, trainer: pl.Trainer) -> bool:
            there = self._writes and checkpoint_exists(callback, filepath)
            there = there and not self._written.is_there(os.fspath(filepath))
            return bool(trainer.strategy.broadcast(there))

        return file_exists
