"""Rows of loggers are written once, though a batch, or the tail of a step, may be done again.

What is done again logs again: Lightning itself in the tail, callbacks such as `LearningRateMonitor` and the user's own
wherever they like. So the rank that writes remembers which rows it has written since each snapshot, and when it goes
back to one, lets those pass. It leaves them in the store too, for the process that may have to take its place.
"""

import json
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

from lightning.pytorch.loggers import Logger

from lightning_replica.recovery.generation import Store
from lightning_replica.recovery.interface import Kind

_KEY = "rows"

Row: TypeAlias = tuple[int, int | None, tuple[str, ...]]
"""Number of the logger, step, names of the metrics. Not their values: a redone batch takes another time."""


class LoggerRows:
    """Watches what the loggers of a fit write, on the rank that writes.

    Args:
        store: Where a replacement finds what was written.
        loggers: The trainer's.
        newborn: Whether this process is a replacement: until it has joined, it could only repeat its predecessor.
    """

    def __init__(self, store: Store, loggers: Sequence[Logger], newborn: bool) -> None:
        self._store, self._joining = store, newborn
        self._since: dict[Kind, tuple[int, list[Row]]] = {"batch": (-1, []), "tail": (-1, [])}
        if newborn and store.check([_KEY]):
            for kind, (step, rows) in json.loads(store.get(_KEY)).items():
                self._since[kind] = (step, [(number, row_step, tuple(names)) for number, row_step, names in rows])
        self._back: tuple[Kind, int] | None = None  # where this rank has gone back to, and is doing again
        self._passing: Counter[Row] = Counter()
        for number, logger in enumerate(loggers):
            vars(logger)["log_metrics"] = self._once(number, logger, type(logger).log_metrics)

    def release(self, loggers: Sequence[Logger]) -> None:
        """Leave the loggers alone."""
        for logger in loggers:
            vars(logger).pop("log_metrics", None)

    def taken(self, kind: Kind, step: int) -> None:
        """A snapshot is taken: what is written from now on would be written again by whoever goes back to it."""
        if (kind, step) == self._back:
            return  # the one that this rank has gone back to
        self._since[kind] = (step, [])
        if kind == "tail":  # what was written after the next commit, whoever goes back before it has not written
            self._back = None
            self._passing.clear()

    def restored(self, kind: Kind, step: int) -> None:
        """This rank goes back to a snapshot, or, as a replacement, takes its predecessor's place there."""
        self._joining = False
        at, written = self._since[kind]
        if at != step:  # nothing was written since
            at, written = self._since[kind] = (step, [])
        self._back, self._passing = (kind, step), Counter(written)

    def _once(self, number: int, logger: Logger, original: Callable[..., Any]) -> Callable[..., None]:
        def log_metrics(metrics: dict[str, float], step: int | None = None) -> None:
            if self._joining:
                return
            row = (number, step, tuple(sorted(metrics)))
            written = self._passing[row] > 0
            if written:
                self._passing[row] -= 1
            else:
                original(logger, metrics, step)
                logger.save()  # a row that only this process knows would be lost with it, and taken for written
            for kind, (_, rows) in self._since.items():
                if not written or (self._back is not None and self._back[0] == "tail" and kind == "batch"):
                    rows.append(row)  # else it is there already
            self._store.set(_KEY, json.dumps(self._since))

        return log_metrics
