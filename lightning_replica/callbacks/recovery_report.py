"""Every incident as a line in a file and as scalars in the loggers."""

import json
import os
from pathlib import Path
from typing import Any

import lightning.pytorch as pl

from lightning_replica.callbacks.lines import append
from lightning_replica.callbacks.recovery_callback import RecoveryCallback
from lightning_replica.errors import ConfigurationError
from lightning_replica.messages import say
from lightning_replica.recovery.incident import Incident


class RecoveryReport(RecoveryCallback):
    """Writes every incident to a file of JSON lines, and to the trainer's loggers.

    The line is written when the first good step is done, or when recovery has failed: by one rank, in one write to
    the file's end. Should that rank be lost before it has written, the line comes with the next one.

    Scalars: ``replica/recovery_s``, ``replica/first_good_step_s``, ``replica/redone_s``, ``replica/redone_batches``,
    ``replica/moved_bytes`` and ``replica/incidents``, the number of incidents so far, at the trainer's global step.

    Args:
        path: The file; it may be there already. By default ``recovery.jsonl`` in the logger's directory, or in
            ``default_root_dir`` where there is no logger.
    """

    def __init__(self, path: str | os.PathLike[str] | None = None) -> None:
        self._path = None if path is None else Path(path)
        self._last: tuple[tuple[str, int], str] | None = None

    def setup(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        """Finds out where to write; collective, as ``trainer.log_dir`` is.

        Raises:
            ConfigurationError: If there are two reports to the same file.
        """
        path = Path(trainer.strategy.broadcast(trainer.log_dir or trainer.default_root_dir)) / "recovery.jsonl"
        self._path = path if self._path is None else self._path
        callbacks: list[Any] = trainer.callbacks  # type: ignore[attr-defined]
        if any(
            isinstance(other, RecoveryReport) and other is not self and other._path == self._path for other in callbacks
        ):
            raise ConfigurationError(
                f"Two RecoveryReport callbacks write to {self._path}. Keep one, or give them paths."
            )

    def on_incident(self, trainer: pl.Trainer, pl_module: pl.LightningModule, incident: Incident) -> None:
        """Writes the line and the scalars."""
        known, line = (incident.time, incident.generation), incident.to_json()
        if incident.teller == trainer.global_rank:
            self._write([*filter(None, [self._last]), (known, line)])
        self._last = known, line
        for logger in trainer.loggers if trainer.is_global_zero else ():
            logger.log_metrics(_scalars(incident), step=trainer.global_step)

    def _write(self, lines: list[tuple[tuple[str, int], str]]) -> None:
        """Appends those of ``lines`` that are not in the file yet."""
        if self._path is None:
            return
        try:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            there = self._path.read_bytes() if self._path.exists() else b""
            written = {_known(line) for line in there.splitlines()}
            text = "".join(f"{line}\n" for known, line in lines if known not in written)
            if there and not there.endswith(b"\n"):
                text = f"\n{text}"  # somebody died in the middle of a line
            append(self._path, text)
        except OSError as error:  # no reason to lose a training that has just been saved
            say(f"the incident could not be written to {self._path}: {error}")


def _known(line: bytes) -> tuple[str, int] | None:
    try:
        plain = json.loads(line)
        return plain["time"], plain["generation"]
    except (ValueError, KeyError, TypeError):
        return None


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
