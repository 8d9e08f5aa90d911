"""The local files to which loggers write rows, and how a replacement cuts off what its predecessor has half written.

A rank may be lost while it writes a row, or before it could note that it has. The row is written again then. So the
rank notes before each row how long the files are, and its replacement makes them that long again.
"""

import os
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import TypeAlias

from lightning_replica._compat.lightning import widen_csv
from lightning_replica._compat.lightning_names import CSVLogger, Logger, TensorBoardLogger

Lengths: TypeAlias = dict[str, int]
"""The lengths of files in bytes, by path; -1 where there was none."""


def lengths_before(logger: Logger, names: Iterable[str]) -> Lengths | None:
    """Return how long the files of a logger are before it writes a row; everything before the row is in the files.

    Args:
        logger: The logger.
        names: The names of the row's metrics.

    Returns:
        None if it is not known where the logger writes, as with a subclass that writes rows itself, or if that is not
        on a local disk.
    """
    write = getattr(type(logger), "log_metrics", None)
    if isinstance(logger, CSVLogger) and write is CSVLogger.log_metrics:
        path = widen_csv(logger, names)
        return None if path is None else {path: _length(path)}
    if isinstance(logger, TensorBoardLogger) and write is TensorBoardLogger.log_metrics:
        logger.experiment.flush()
        directories = getattr(logger.experiment, "all_writers", None) or ()
        return {
            os.fspath(path): _length(path) for each in directories for path in Path(each).glob("*tfevents*")
        } or None
    return None


def cut(lengths: Mapping[str, int]) -> None:
    """Remove what files hold beyond their lengths."""
    for path, length in lengths.items():
        if length < 0:
            Path(path).unlink(missing_ok=True)
        elif _length(path) > length:
            os.truncate(path, length)


def _length(path: str | os.PathLike[str]) -> int:
    return os.path.getsize(path) if os.path.isfile(path) else -1
