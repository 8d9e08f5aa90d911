"""Writes each row of a logger once, even if a batch or the tail of a step is repeated.

Code that is repeated logs again: Lightning itself in the tail, callbacks such as `LearningRateMonitor` and those of the
user anywhere. So the rank that writes remembers which rows it has written since each snapshot. When it goes back to a
snapshot, it does not write those rows again.
"""

import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, Final

from lightning_replica._compat.lightning_names import Logger
from lightning_replica._compat.packages import is_of_lightning
from lightning_replica.core.inexact import Report, Scope, warn
from lightning_replica.core.recoverable import Kind
from lightning_replica.state.objects.capture import Anchors, Recorder, Root
from lightning_replica.state.objects.kinds import LIVE, describe, is_harmless, is_live
from lightning_replica.state.objects.records import Unknown
from lightning_replica.state.objects.tracked import Taken, Tracked
from lightning_replica.state.reachable import is_users
from lightning_replica.state.row_files import Lengths, cut, have_grown, lengths_of, widened
from lightning_replica.state.written import Written
from lightning_replica.stores.interface import Store

_EXPERIMENT: Final = frozenset(("_experiment",))  # what Lightning's loggers write to: `logger_runs` goes on with it


class LoggerRows:
    """Watches what the loggers of a fit write, on the rank that writes.

    Args:
        store: The store in which a replacement finds what was written.
        loggers: The trainer's loggers.
        is_replacement: Whether this process is a replacement. It writes nothing until it has joined, because until
            then it could only repeat its predecessor.
        named: Returns what has a name beside the loggers. A logger may refer to it, and does not contain it.
        report: Called with a logger that keeps rows in memory, which a replacement lacks.
    """

    def __init__(
        self,
        store: Store,
        loggers: Sequence[Logger],
        is_replacement: bool,
        named: Callable[[], Anchors] = lambda: Anchors({}),
        report: Report = warn,
    ) -> None:
        self._written, self._joining, self._report = Written(store, "rows", is_replacement), is_replacement, report
        unclear = [number for number, logger in enumerate(loggers) if is_replacement and is_users(logger)]
        self._memory = {number: _Memory(loggers[number], number, named) for number in unclear}
        self._lengths: dict[int, Lengths | None] = {}  # of files after the last row, by number of the logger
        self._training = False
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
        if not self._training:  # what Lightning has written before, as hyperparameters, is written once
            self._training = True
            self._lengths.clear()
        self._written.taken(kind, step)

    def restored(self, kind: Kind, step: int) -> None:
        """Note that this rank goes back to a snapshot."""
        if self._joining:
            self._joining = False
            self._end_begun_row()
        self._written.abandon()
        self._written.restored(kind, step)

    def _end_begun_row(self) -> None:
        """Remove the part that the predecessor has written of a row, because the row is written again."""
        row, lengths = self._written.begun or ("", {})
        if lengths is not None:
            cut(lengths)
            return
        number, step, _ = json.loads(row)
        why = f"rank 0 was lost while it wrote the row of step {step}, which may be there twice"
        self._report(self._name(number), why, "once")

    def _once(self, number: int, logger: Logger, original: Callable[..., Any]) -> Callable[..., None]:
        def log_metrics(*args: Any, **kwargs: Any) -> None:  # some loggers take more arguments than Lightning's
            if self._joining:
                return
            given = {**dict(zip(("metrics", "step"), args, strict=False)), **kwargs}
            # Without the values of metrics: a repeated batch takes more or less time, for example.
            row = json.dumps([number, given.get("step"), sorted(given["metrics"])])
            if not self._written.is_there(row):
                lengths = lengths_of(logger)
                self._compare(number, lengths)
                self._lengths.pop(number, None)  # until the row is complete: it may raise
                self._written.begin(row, widened(logger, lengths, given["metrics"]))
                original(*args, **kwargs)
                logger.save()  # a row only in this process's memory would be lost with it, yet count as written
                self._remember(number, lengths_of(logger))
                self._look(number)
            self._written.add(row)

        return log_metrics

    def _remember(self, number: int, lengths: Lengths | None) -> None:
        """Note how long files are after a row, unless loggers share them: rows of one are not those of the other."""
        shared = {other for other, known in self._lengths.items() if {*(known or ())} & {*(lengths or ())}}
        self._lengths = {other: known for other, known in self._lengths.items() if other not in shared}
        if shared <= {number}:
            self._lengths[number] = lengths

    def _compare(self, number: int, lengths: Lengths | None) -> None:
        """Report what was written to a logger's files since its last row, as pictures are."""
        if have_grown(self._lengths.get(number), lengths):
            why = "code writes to its files beside its rows: of a repeated step, that is there twice or missing"
            self._report(self._name(number), why)

    def _name(self, number: int) -> str:
        return f"logger {number} ({type(self._before[number][0]).__name__})"

    def _look(self, number: int) -> None:
        """Report a logger of the user's that holds something else after each row: a replacement's is not complete."""
        for name, why, scope in self._memory[number].lacking() if number in self._memory else ():
            self._report(name, why, scope)
            self._memory.pop(number, None)


class _Memory:
    """What a logger of the user's holds from one row to the next.

    Args:
        logger: The logger, of a replacement.
        number: Its place among the trainer's loggers.
        named: Returns what has a name beside the loggers.
    """

    def __init__(self, logger: Logger, number: int, named: Callable[[], Anchors]) -> None:
        goes_on = any(is_of_lightning(base.__module__) for base in type(logger).__mro__ if base is not Logger)
        own = frozenset(("log_metrics",)) | (_EXPERIMENT if goes_on else frozenset())
        self._roots, self._named = [Root(logger, f"logger {number} ({type(logger).__name__})", own)], named
        self._anchors: Anchors | None = None
        self._tracked = Tracked(_ignore)  # what cannot be restored matters here only if it has changed
        self._first = Taken()

    def lacking(self) -> Iterator[tuple[str, str, Scope]]:
        """Yield what the logger lacks of what its predecessor held, after each row: its name, why, and a scope."""
        if self._anchors is None:
            self._anchors = self._known()
            self._tracked.begin(self._roots, self._anchors)
            self._first = self._tracked.take(self._roots, self._anchors, whole=True)
            return
        (root,) = self._roots
        taken = self._tracked.take(self._roots, self._anchors, whole=True)
        for name in sorted(taken.changed.get(root.name, ())):
            yield f"{root.name}.{name}", "it changes with rows, and this replacement has only those since", "once"
        for record in self._first.capture.records.values():
            if isinstance(record, Unknown) and not is_harmless(type(record.value)):
                what, changed = describe(record.value), record.has_changed()
                if changed:
                    yield record.name, f"it is a {what}, and this replacement's has only the rows since", "once"
                elif changed is None:
                    yield record.name, f"it is a {what}: whether it keeps rows, nothing shows", "unknown"

    def _known(self) -> Anchors:
        """Return what the logger does not keep: what has a name, and files, sockets and threads, to which rows go."""
        named = self._named()
        found = Recorder(_ignore).take(self._roots, named).records.values()
        unknown = (each for each in found if isinstance(each, Unknown))
        leave = {id(each.value): each.name for each in unknown if is_live(each.value) or isinstance(each.value, LIVE)}
        return replace(named, names={**named.names, **leave})


def _original(logger: Logger) -> Callable[..., Any]:
    """Return the method of the logger's class, whatever the logger itself has; a stand-in's class may have none."""
    method = getattr(type(logger), "log_metrics", None)
    return logger.log_metrics if method is None else partial(method, logger)


def _ignore(name: str, why: str, scope: Scope = "fault") -> None:
    """Report nothing."""
