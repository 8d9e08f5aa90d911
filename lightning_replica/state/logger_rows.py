"""Writes each row of a logger once, even if a batch or the tail of a step is repeated.

Code that is repeated logs again: Lightning itself in the tail, callbacks such as `LearningRateMonitor` and those of the
user anywhere. So the rank that writes remembers which rows it has written since each snapshot. When it goes back to a
snapshot, it does not write those rows again.
"""

import json
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from lightning_replica._compat.lightning_names import Logger
from lightning_replica.core.inexact import Report, warn
from lightning_replica.recovery.interface import Kind
from lightning_replica.state.objects.kinds import pickled_digest
from lightning_replica.state.reachable import is_users
from lightning_replica.state.written import Written
from lightning_replica.stores.interface import Store


class LoggerRows:
    """Watches what the loggers of a fit write, on the rank that writes.

    Args:
        store: The store in which a replacement finds what was written.
        loggers: The trainer's loggers.
        newborn: Whether this process is a replacement. It writes nothing until it has joined, because until then it
            could only repeat its predecessor.
        report: Called with a logger that keeps rows in memory, which a replacement lacks.
    """

    def __init__(self, store: Store, loggers: Sequence[Logger], newborn: bool, report: Report = warn) -> None:
        self._written, self._joining, self._report = Written(store, "rows", newborn), newborn, report
        self._unclear = {number for number, logger in enumerate(loggers) if newborn and is_users(logger)}
        self._held: dict[int, bytes | None] = {}
        # Other code may have replaced a logger's method, too.
        self._before = [(logger, vars(logger).get("log_metrics")) for logger in loggers]
        for number, logger in enumerate(loggers):
            vars(logger)["log_metrics"] = self._once(number, logger, _original(logger))

    def release(self) -> None:
        """Stop watching the loggers."""
        for logger, before in self._before:
            vars(logger).pop("log_metrics", None)
            if before is not None:
                vars(logger)["log_metrics"] = before

    def taken(self, kind: Kind, step: int) -> None:
        """Note that a snapshot is taken."""
        self._written.taken(kind, step)

    def restored(self, kind: Kind, step: int) -> None:
        """Note that this rank goes back to a snapshot."""
        self._joining = False
        self._written.restored(kind, step)

    def _once(self, number: int, logger: Logger, original: Callable[..., Any]) -> Callable[..., None]:
        def log_metrics(*args: Any, **kwargs: Any) -> None:  # some loggers take more arguments than Lightning's
            if self._joining:
                return
            given = {**dict(zip(("metrics", "step"), args, strict=False)), **kwargs}
            # Without the values of metrics: a repeated batch takes more or less time, for example.
            row = json.dumps([number, given.get("step"), sorted(given["metrics"])])
            if not self._written.is_there(row):
                self._written.wait_for_store()
                original(*args, **kwargs)
                logger.save()  # a row only in this process's memory would be lost with it, yet count as written
                if number in self._unclear:
                    self._look(number, logger)
            self._written.add(row)

        return log_metrics

    def _look(self, number: int, logger: Logger) -> None:
        """Report a logger of the user's that holds more after each row: what a replacement's holds is not complete."""
        held = pickled_digest({name: value for name, value in vars(logger).items() if name != "log_metrics"})
        if held is not None and self._held.setdefault(number, held) == held:
            return
        self._unclear.remove(number)
        name = f"logger {number} ({type(logger).__name__})"
        self._report(
            name, "it keeps what it logs in memory, and this replacement has only what was logged since", "once"
        )


def _original(logger: Logger) -> Callable[..., Any]:
    """Return the method of the logger's class, whatever the logger itself has; a stand-in's class may have none."""
    method = getattr(type(logger), "log_metrics", None)
    return logger.log_metrics if method is None else partial(method, logger)
