"""The local files to which loggers write rows, and how a replacement cuts off what its predecessor has half written.

A rank may be lost while it writes a row, or before it could note that it has. The row is written again then. So the
rank notes before each row how long the files are, and its replacement makes them that long again.
"""

import os
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import TypeAlias

from lightning_replica._compat.lightning import csv_file, widen_csv
from lightning_replica._compat.lightning_names import CSVLogger, Logger, TensorBoardLogger

Lengths: TypeAlias = dict[str, int]
"""The lengths of files in bytes, by path; -1 where there was none."""


def lengths_of(logger: Logger) -> Lengths | None:
    """Return how long the files of a logger are, with everything in them that it was given.

    Returns:
        None if it is not known where the logger writes, as with a subclass that writes rows itself, or if that is not
        on a local disk.
    """
    write = getattr(type(logger), "log_metrics", None)
    if isinstance(logger, CSVLogger) and write is CSVLogger.log_metrics:
        path = csv_file(logger)
        return None if path is None else {path: _length(path)}
    if isinstance(logger, TensorBoardLogger) and write is TensorBoardLogger.log_metrics:
        logger.experiment.flush()
        directories = getattr(logger.experiment, "all_writers", None) or ()
        return {
            os.fspath(path): _length(path) for each in directories for path in Path(each).glob("*tfevents*")
        } or None
    return None


def widened(logger: Logger, lengths: Lengths | None, names: Iterable[str]) -> Lengths | None:
    """Return how long files are once they have room for a row.

    Args:
        logger: The logger.
        lengths: How long they are without.
        names: The names of the row's metrics.
    """
    if not isinstance(logger, CSVLogger) or lengths is None:
        return lengths
    for path in lengths:
        widen_csv(logger, path, names)
    return {path: _length(path) for path in lengths}


def have_grown(before: Lengths | None, now: Lengths | None) -> bool:
    """True if something was written to the files of a logger meanwhile."""
    return before is not None and any(length > before.get(path, -1) for path, length in (now or {}).items())


def cut(lengths: Mapping[str, int]) -> None:
    """Remove what files hold beyond their lengths."""
    for path, length in lengths.items():
        if length < 0:
            Path(path).unlink(missing_ok=True)
        elif _length(path) > length:
            os.truncate(path, length)


def _length(path: str | os.PathLike[str]) -> int:
    return os.path.getsize(path) if os.path.isfile(path) else -1
