"""Keeps the names of a `ModelCheckpoint`'s checkpoints, even if the tail that writes them is repeated.

If a checkpoint's file exists already, Lightning chooses another name (``-v1``), and later removes the file of that
name. So a file that was written since the snapshot counts as missing: it is written again, with the same contents, in
the same place.
"""

import os
from collections.abc import Callable, Sequence
from typing import Any, Final

from lightning_replica._compat.lightning import checkpoint_exists
from lightning_replica._compat.lightning_names import Callback, ModelCheckpoint, pl
from lightning_replica.core.inexact import Report, warn
from lightning_replica.core.recoverable import Kind
from lightning_replica.state.written import Written
from lightning_replica.stores.interface import Store

_REMOVED: Final = "removed: "


class CheckpointFiles:
    """A record of the files that a fit's checkpoint callbacks write.

    Rank 0 keeps the record. The other ranks ask rank 0 whether a file exists, as they do in Lightning.

    Args:
        store: The store in which a replacement finds the record.
        callbacks: The trainer's callbacks; others than `ModelCheckpoint` are ignored.
        is_replacement: Whether this process is a replacement.
        writes: Whether this rank keeps the record.
        report: Called with checkpoints that the predecessor was still writing when it was lost.
    """

    def __init__(
        self, store: Store, callbacks: Sequence[Callback], is_replacement: bool, writes: bool, report: Report = warn
    ) -> None:
        self._written = Written(store, "checkpoints", is_replacement and writes)
        self._writes, self._report, self._joins = writes, report, is_replacement and writes
        self._callbacks = [callback for callback in callbacks if isinstance(callback, ModelCheckpoint)]
        for callback in self._callbacks:
            vars(callback)["file_exists"] = self._exists(callback)

    def release(self) -> None:
        """Give the callbacks their own ``file_exists`` back."""
        for callback in self._callbacks:
            vars(callback).pop("file_exists", None)

    def taken(self, kind: Kind, step: int) -> None:
        """Note that a snapshot is taken."""
        self._written.taken(kind, step)

    def restored(self, kind: Kind, step: int) -> None:
        """Note that this rank goes back to a snapshot."""
        self._written.restored(kind, step)
        if self._joins:
            self._joins = False
            self._name_missing()

    def is_written(self, path: str | os.PathLike[str]) -> None:
        """Note that a checkpoint is about to be written.

        Call this before the write: a rank may be lost when the file exists, but before it could note that.
        """
        if self._writes:
            self._written.add(os.fspath(path))
            self._written.wait_for_store()

    def is_removed(self, path: str | os.PathLike[str]) -> None:
        """Note that a checkpoint is about to be removed: callbacks may go back to where they know of it."""
        if self._writes:
            self._written.add(_REMOVED + os.fspath(path))

    def _name_missing(self) -> None:
        """Name checkpoints that callbacks know of, and that are not there.

        `AsyncCheckpointIO` writes in a thread, and a script may empty its folder when it starts
        (``force_reset`` of darts).
        """
        for callback in self._callbacks:
            known = dict.fromkeys((*callback.best_k_models, callback.best_model_path, callback.last_model_path))
            for path in filter(None, known):
                known_why = self._written.is_there(path) or self._written.is_there(_REMOVED + path)
                if not known_why and not checkpoint_exists(callback, path):
                    why = (
                        "it is not there; rank 0 may have been writing it when it was lost, or your script, which a"
                        " replacement runs from the top, removes it when it starts"
                    )
                    self._report(path, why, "once")

    def _exists(self, callback: ModelCheckpoint) -> Callable[[Any, pl.Trainer], bool]:
        def file_exists(filepath: Any, trainer: pl.Trainer) -> bool:
            exists = self._writes and checkpoint_exists(callback, filepath)
            exists = exists and not self._written.is_there(os.fspath(filepath))
            return bool(trainer.strategy.broadcast(exists))

        return file_exists
