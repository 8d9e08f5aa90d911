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
        self._since: dict[tuple[Kind, int], list[Row]] = {}  # by snapshot: the rows that were written since
        self._passing: Counter[Row] = Counter()  # rows that are there already, should they be logged again
        self._back: tuple[Kind, int] | None = None  # where this rank has gone back to, and is doing again
        self._anew: set[tuple[Kind, int]] = set()  # snapshots taken since then
        if newborn and store.check([_KEY]):
            for kind, step, rows in json.loads(store.get(_KEY)):
                self._since[kind, step] = [(number, row_step, tuple(names)) for number, row_step, names in rows]
        for number, logger in enumerate(loggers):
            vars(logger)["log_metrics"] = self._once(number, logger, type(logger).log_metrics)

    def release(self, loggers: Sequence[Logger]) -> None:
        """Leave the loggers alone."""
        for logger in loggers:
            vars(logger).pop("log_metrics", None)

    def taken(self, kind: Kind, step: int) -> None:
        """A snapshot is taken: what is written from now on would be written again by whoever goes back to it.

        The commit that follows the one of a tail may fail, so those of the step before are kept until a batch begins.
        """
        if (kind, step) == self._back:
            return  # the one that this rank has gone back to
        if kind == "batch":
            self._since = {key: rows for key, rows in self._since.items() if key[1] >= step}
        else:  # what comes after the commit nobody has written who has gone back to before it
            self._back = None
            self._passing.clear()
        self._since[kind, step] = []
        self._anew.add((kind, step))

    def restored(self, kind: Kind, step: int) -> None:
        """This rank goes back to a snapshot, or, as a replacement, takes its predecessor's place there."""
        self._joining = False
        self._back, self._anew = (kind, step), set()
        self._passing = Counter(self._since.setdefault((kind, step), []))

    def _once(self, number: int, logger: Logger, original: Callable[..., Any]) -> Callable[..., None]:
        def log_metrics(metrics: dict[str, float], step: int | None = None) -> None:
            if self._joining:
                return
            row = (number, step, tuple(sorted(metrics)))
            passes = self._passing[row] > 0
            if passes:
                self._passing[row] -= 1
            else:
                original(logger, metrics, step)
                logger.save()  # a row that only this process knows would be lost with it, and taken for written
            for key, rows in self._since.items():
                if not passes or key in self._anew:
                    rows.append(row)  # else it is there
            self._store.set(_KEY, json.dumps([(*key, rows) for key, rows in self._since.items()]))

        return log_metrics
