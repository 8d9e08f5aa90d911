"""Rows of loggers are written once, though a batch, or the tail of a step, may be done again.

What is done again logs again: Lightning itself in the tail, callbacks such as `LearningRateMonitor` and the user's own
wherever they like. So the rank that writes remembers which rows it has written since each snapshot, and when it goes
back to one, lets those pass.
"""

import json
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from lightning.pytorch.loggers import Logger

from lightning_replica.recovery.generation import Store
from lightning_replica.recovery.interface import Kind
from lightning_replica.written import Written


class LoggerRows:
    """Watches what the loggers of a fit write, on the rank that writes.

    Args:
        store: Where a replacement finds what was written.
        loggers: The trainer's.
        newborn: Whether this process is a replacement: until it has joined, it could only repeat its predecessor.
    """

    def __init__(self, store: Store, loggers: Sequence[Logger], newborn: bool) -> None:
        self._written, self._joining = Written(store, "rows", newborn), newborn
        # Somebody else may watch a logger too.
        self._before = [(logger, vars(logger).get("log_metrics")) for logger in loggers]
        for number, logger in enumerate(loggers):
            vars(logger)["log_metrics"] = self._once(number, logger, _original(logger))

    def release(self) -> None:
        """Leave the loggers alone."""
        for logger, before in self._before:
            vars(logger).pop("log_metrics", None)
            if before is not None:
                vars(logger)["log_metrics"] = before

    def taken(self, kind: Kind, step: int) -> None:
        """A snapshot is taken."""
        self._written.taken(kind, step)

    def restored(self, kind: Kind, step: int) -> None:
        """This rank goes back to a snapshot."""
        self._joining = False
        self._written.restored(kind, step)

    def _once(self, number: int, logger: Logger, original: Callable[..., Any]) -> Callable[..., None]:
        def log_metrics(*args: Any, **kwargs: Any) -> None:  # some loggers take more than Lightning's do
            if self._joining:
                return
            given = {**dict(zip(("metrics", "step"), args, strict=False)), **kwargs}
            # Not the values of metrics: a batch that is done again takes another time.
            row = json.dumps([number, given.get("step"), sorted(given["metrics"])])
            if not self._written.is_there(row):
                original(*args, **kwargs)
                logger.save()  # a row that only this process knows would be lost with it, and taken for written
            self._written.add(row)

        return log_metrics


def _original(logger: Logger) -> Callable[..., Any]:
    """What the logger's class does, whoever watches the logger itself; a stand-in for another has no such method."""
    method = getattr(type(logger), "log_metrics", None)
    return logger.log_metrics if method is None else partial(method, logger)
