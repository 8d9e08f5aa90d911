"""Every incident as a line in a file and as scalars in the loggers."""

import os
from pathlib import Path
from typing import Any

from lightning_replica._compat.lightning_names import pl
from lightning_replica.callbacks.recovery_callback import RecoveryCallback
from lightning_replica.errors import ConfigurationError
from lightning_replica.recovery.incident import Incident
from lightning_replica.report.log import IncidentLog


class RecoveryReport(RecoveryCallback):
    """Writes every incident to a file of JSON lines, and to the trainer's loggers.

    One rank appends the line, in one write, when the first good step is done or when recovery has failed. If that
    rank is lost before it writes, the line is written together with the next one.

    Scalars: ``replica/recovery_s``, ``replica/first_good_step_s``, ``replica/redone_s``, ``replica/redone_batches``,
    ``replica/moved_bytes`` and ``replica/incidents``, the number of incidents so far, at the trainer's global step.

    Args:
        path: The file; it may exist already. By default ``recovery.jsonl`` in the logger's directory, or in
            ``default_root_dir`` where there is no logger.
    """

    def __init__(self, path: str | os.PathLike[str] | None = None) -> None:
        self._path = None if path is None else Path(path)
        self._log: IncidentLog | None = None

    def setup(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        """Determine where to write. Collective, because ``trainer.log_dir`` is.

        Raises:
            ConfigurationError: If two reports write to the same file.
        """
        path = Path(trainer.strategy.broadcast(trainer.log_dir or trainer.default_root_dir)) / "recovery.jsonl"
        self._path = path if self._path is None else self._path
        self._log = self._log or IncidentLog(self._path)
        callbacks: list[Any] = trainer.callbacks  # type: ignore[attr-defined]
        if any(
            isinstance(other, RecoveryReport) and other is not self and other._path == self._path for other in callbacks
        ):
            raise ConfigurationError(
                f"Two RecoveryReport callbacks write to {self._path}. Keep one, or give them different paths."
            )

    def on_incident(self, trainer: pl.Trainer, pl_module: pl.LightningModule, incident: Incident) -> None:
        """Write the line and the scalars."""
        if self._log is not None:
            self._log.add(incident, trainer.global_rank)
        for logger in trainer.loggers if trainer.is_global_zero else ():
            logger.log_metrics(_scalars(incident), step=trainer.global_step)


def _scalars(incident: Incident) -> dict[str, float]:
    scalars = {
        "replica/incidents": float(incident.number),
        "replica/recovery_s": incident.recovery_s,
        "replica/redone_s": incident.redone_s,
        "replica/redone_batches": float(incident.redone_batches),
        "replica/moved_bytes": float(sum(move.bytes for move in incident.moves)),
    }
    if incident.first_good_step_s is not None:
        scalars["replica/first_good_step_s"] = incident.first_good_step_s
    return scalars
