"""The records of what a fit has written, in a process and for its replacement."""

from functools import partial

from lightning_replica._compat.lightning_names import pl
from lightning_replica.core.inexact import Report
from lightning_replica.core.recoverable import Kind
from lightning_replica.state.checkpoint_files import CheckpointFiles
from lightning_replica.state.logger_rows import LoggerRows
from lightning_replica.state.reachable import anchors_of
from lightning_replica.trainer.session import Session


class Records:
    """Keeps what a rank writes again, because it has gone back to a snapshot, from being there twice.

    Args:
        trainer: The trainer that fits.
        session: The session of this process.
        report: Called with what a replacement lacks.

    Attributes:
        files: The record of checkpoint files.
    """

    def __init__(self, trainer: pl.Trainer, session: Session, report: Report) -> None:
        recovers, store = session.options.recovery, session.world.generations.store
        writes = recovers and trainer.is_global_zero
        saving = trainer.checkpoint_callbacks if recovers else ()
        self.files = CheckpointFiles(store, saving, session.is_replacement, writes, report)
        named = partial(anchors_of, trainer)
        rows = [LoggerRows(store, trainer.loggers, session.is_replacement, named, report)] if writes else []
        self._each: list[CheckpointFiles | LoggerRows] = [self.files, *rows]

    def taken(self, kind: Kind, step: int) -> None:
        """Note that a snapshot is taken."""
        for each in self._each:
            each.taken(kind, step)

    def restored(self, kind: Kind, step: int) -> None:
        """Note that this rank goes back to a snapshot."""
        for each in self._each:
            each.restored(kind, step)

    def release(self) -> None:
        """Leave loggers and callbacks as they were."""
        for each in self._each:
            each.release()
