"""Lets the loggers of one training write to one run, whichever process makes them.

A logger chooses a version, or is given an id, when it begins. The script makes its loggers in the process that the user
starts, in every rank, and again in a rank's replacement. It may use them before `fit`. So an earlier process stores the
versions and ids of its loggers. A later process gives them to its own loggers as soon as those are made: the n-th
logger of a class, among those with the same settings, gets what the n-th of these had.
"""

import gc
import json
import sys
import weakref
from collections.abc import Iterable, Sequence
from typing import Any

from lightning_replica._compat.lightning import continue_csv, when_made
from lightning_replica._compat.lightning_names import CSVLogger, Logger
from lightning_replica.control import keys
from lightning_replica.core.entry import RankProcess, at_entry
from lightning_replica.errors import RecoveryError
from lightning_replica.stores.interface import Store

# Attributes with the version or id of a run: CSV, TensorBoard and Lightning's own; Weights & Biases; MLflow; Comet.
_NAMES = ("_version", "_id", "_run_id", "_experiment_id", "_experiment_key")

_made: "list[weakref.ref[Logger]]" = []


def record(loggers: Iterable[Logger]) -> list[dict[str, Any]]:
    """Return the versions and ids of the loggers' runs as plain data; no logger has to choose one for this."""
    return [
        {
            "class": type(logger).__name__,
            "settings": _settings(logger),
            "names": _names(logger),
            "begun": _has_begun(logger),
        }
        for logger in loggers
    ]


def adopt(loggers: Sequence[Logger], recorded: Sequence[dict[str, Any]], writes: bool) -> None:
    """Give ``loggers`` the runs that a predecessor has recorded.

    Args:
        loggers: The loggers of a replacement, before they have begun.
        recorded: What `record` returned in the process that the replacement replaces.
        writes: Whether this rank is the one that writes.

    Raises:
        RecoveryError: If the script has made other loggers than in the predecessor.
    """
    own, before = [type(logger).__name__ for logger in loggers], [run["class"] for run in recorded]
    if own != before:
        raise RecoveryError(
            f"This replacement has loggers {own}, but its predecessor had {before}."
            " The script must do the same on every start until `fit` begins."
        )
    for logger, run in zip(loggers, recorded, strict=True):
        _adopt(logger, run, writes)


def hand_over() -> dict[str, str]:
    """End this process's part in the runs of its loggers, so that the ranks can continue them.

    Returns:
        The entries of the supervisor's store in which the ranks find the runs.
    """
    # Not `isinstance`, which asks objects for attributes: some of torch's warn that they are deprecated
    # (tests/state/test_logger_runs.py::test_no_object_is_asked_for_an_attribute).
    loggers: list[Logger] = [each for each in gc.get_objects() if issubclass(type(each), Logger)]
    recorded = record(loggers)
    for logger in loggers:
        if "_wandb_init" in vars(logger) and _has_begun(logger):
            vars(logger)["_experiment"].finish()
            sys.modules["wandb"].teardown()  # otherwise the ranks would use its service, too
    return {keys.FIRST_RUNS: json.dumps(recorded)} if any(run["names"] for run in recorded) else {}


def leave(store: Store, rank: int) -> None:
    """Store the runs of the loggers made so far, for a process that may have to take this one's place."""
    loggers = [logger for logger in (reference() for reference in _made) if logger is not None]
    store.set(keys.runs(rank), json.dumps(record(loggers)))


def _follow(rank: RankProcess) -> None:
    """Let loggers that are made from now on continue the runs of the process before this one."""
    store = rank.connect()
    key = next((key for key in (keys.runs(rank.rank), keys.FIRST_RUNS) if store.check([key])), None)
    runs: list[dict[str, Any]] = json.loads(store.get(key)) if key is not None else []

    if rank.replaces:
        _muted.begin()

    def made(logger: Logger) -> None:
        _made.append(weakref.ref(logger))
        _muted.add(logger)
        run = next((run for run in runs if _is_like(logger, run)), None)
        if run is not None:
            runs.remove(run)
            _adopt(logger, run, writes=rank.rank == 0)

    when_made(Logger, made)


def _adopt(logger: Logger, run: dict[str, Any], writes: bool) -> None:
    vars(logger).update(run["names"])
    options = vars(logger).get("_wandb_init")
    if options is not None and run["names"].get("_id") is not None:
        options.update(id=run["names"]["_id"], resume="allow")
    if writes and run["begun"] and isinstance(logger, CSVLogger):
        continue_csv(logger)


def _settings(logger: Logger) -> dict[str, str]:
    return {name: value for name, value in vars(logger).items() if isinstance(value, str) and name not in _NAMES}


def _is_like(logger: Logger, run: dict[str, Any]) -> bool:
    """Return whether a new logger was made like the logger of a run, which may have more settings by now."""
    same = all(run["settings"].get(name) == value for name, value in _settings(logger).items())
    return same and run["class"] == type(logger).__name__


def _has_begun(logger: Logger) -> bool:
    return vars(logger).get("_experiment") is not None or bool(vars(logger).get("_initialized"))


def mute(loggers: Iterable[Logger]) -> None:
    """Stop ``loggers`` from writing metrics until `unmute`; some may be older than the import of this package."""
    for logger in loggers:
        if not isinstance(vars(logger).get("log_metrics"), _Muted):
            _muted.add(logger)


def unmute() -> None:
    """Let loggers write metrics from now on, because this replacement has joined the other ranks."""
    _muted.end()


class _AllMuted:
    """The loggers of a replacement that has not joined the other ranks yet."""

    def __init__(self) -> None:
        self._on = False
        self._loggers: list[_Muted] = []

    def begin(self) -> None:
        """Mute the loggers that are made from now on."""
        self._on = True

    def add(self, logger: Logger) -> None:
        """Mute a logger that was made, unless the replacement has joined."""
        if self._on:
            self._loggers.append(_Muted(logger))

    def end(self) -> None:
        """Unmute all loggers, and mute no more of them."""
        self._on = False
        while self._loggers:
            self._loggers.pop().end()


_muted = _AllMuted()


class _Muted:
    """Stands in for a logger's ``log_metrics`` until the replacement joins: its predecessor has written these rows.

    With TensorBoard, hyperparameters log a metric, too, and a script may log them before `fit`. Other code may wrap
    this object meanwhile. Then it stays in place after the end, and passes all calls on.
    """

    def __init__(self, logger: Logger) -> None:
        self._logger, self._write, self._muted = logger, logger.log_metrics, True
        self._before = vars(logger).get("log_metrics")  # what other code has put there
        vars(logger)["log_metrics"] = self

    def __call__(self, *args: Any, **kwargs: Any) -> None:
        if not self._muted:
            self._write(*args, **kwargs)

    def end(self) -> None:
        self._muted = False
        if vars(self._logger).get("log_metrics") is self:
            del vars(self._logger)["log_metrics"]
            if self._before is not None:
                vars(self._logger)["log_metrics"] = self._before


def _names(logger: Logger) -> dict[str, Any]:
    found = {name: vars(logger)[name] for name in _NAMES if isinstance(vars(logger).get(name), (str, int))}
    if "_wandb_init" in vars(logger):  # the id is in the run, not in the logger
        found["_id"] = logger.version
    return found


at_entry(_follow)
