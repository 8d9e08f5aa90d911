"""Loggers of one training write to one run, whichever process they are made in.

A logger chooses a version, or is given an id, when it begins. The script makes its loggers in the process that the user
starts, in every rank, and again in a rank's replacement, and may use them before `fit`. So whoever comes first leaves
what its loggers have got, and whoever comes later puts that into its own, as soon as they are made: the n-th of a class
gets what the n-th of that class had.
"""

import gc
import json
import sys
import weakref
from collections.abc import Iterable, Sequence
from typing import Any

from lightning.pytorch.loggers import CSVLogger, Logger

from lightning_replica._compat.lightning import continue_csv, when_made
from lightning_replica.errors import RecoveryError
from lightning_replica.launch.rank import SupervisedRank, at_entry
from lightning_replica.recovery.generation import Store

# Where loggers keep what names their run: CSV, TensorBoard and Lightning's own; Weights & Biases; MLflow; Comet.
_NAMES = ("_version", "_id", "_run_id", "_experiment_id", "_experiment_key")
_FIRST, _OF_RANK = "runs/first", "runs/{}"  # store keys: what the first process had, and what a rank has

_made: "list[weakref.ref[Logger]]" = []


def record(loggers: Iterable[Logger]) -> list[dict[str, Any]]:
    """What names the runs of ``loggers``, as plain data; asks none of them for anything that it has not chosen yet."""
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
    """Gives ``loggers`` the runs that a predecessor has recorded.

    Args:
        loggers: The loggers of a replacement, before they have begun.
        recorded: What `record` gave in the process that it replaces.
        writes: Whether this rank is the one that writes.

    Raises:
        RecoveryError: If the script has made other loggers than the last time.
    """
    own, before = [type(logger).__name__ for logger in loggers], [run["class"] for run in recorded]
    if own != before:
        raise RecoveryError(
            f"This replacement has loggers {own}, its predecessor had {before}."
            " The script must do the same on every start until `fit` begins."
        )
    for logger, run in zip(loggers, recorded, strict=True):
        _adopt(logger, run, writes)


def hand_over() -> dict[str, str]:
    """End this process's part in the runs of its loggers, for ranks to go on with them.

    Returns:
        What the ranks find in the supervisor's store.
    """
    loggers = [each for each in gc.get_objects() if isinstance(each, Logger)]
    recorded = record(loggers)
    for logger in loggers:
        if "_wandb_init" in vars(logger) and _has_begun(logger):
            vars(logger)["_experiment"].finish()
            sys.modules["wandb"].teardown()  # its service would be the ranks' too
    return {_FIRST: json.dumps(recorded)} if any(run["names"] for run in recorded) else {}


def leave(store: Store, rank: int) -> None:
    """Leave what the loggers made so far have got, for a process that may have to take this one's place."""
    loggers = [logger for logger in (reference() for reference in _made) if logger is not None]
    store.set(_OF_RANK.format(rank), json.dumps(record(loggers)))


def _follow(rank: SupervisedRank) -> None:
    """From here on, loggers go on with the runs of whoever came before this process."""
    store = rank.connect()
    key = next((key for key in (_OF_RANK.format(rank.rank), _FIRST) if store.check([key])), None)
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


at_entry(_follow)


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
    """Whether a logger that was just made was made like the one of a run, which may have got more since."""
    same = all(run["settings"].get(name) == value for name, value in _settings(logger).items())
    return same and run["class"] == type(logger).__name__


def _has_begun(logger: Logger) -> bool:
    return vars(logger).get("_experiment") is not None or bool(vars(logger).get("_initialized"))


def mute(loggers: Iterable[Logger]) -> None:
    """Have ``loggers`` write no metrics, until `unmute`; they may have been made before this package was imported."""
    for logger in loggers:
        if not isinstance(vars(logger).get("log_metrics"), _Muted):
            _muted.add(logger)


def unmute() -> None:
    """Have loggers write metrics from now on: this replacement has joined the others."""
    _muted.end()


class _AllMuted:
    """The loggers of a replacement that has not joined yet."""

    def __init__(self) -> None:
        self._on = False
        self._loggers: list[_Muted] = []

    def begin(self) -> None:
        """From here on, loggers that are made are muted."""
        self._on = True

    def add(self, logger: Logger) -> None:
        """A logger was made."""
        if self._on:
            self._loggers.append(_Muted(logger))

    def end(self) -> None:
        """Those that are muted are heard, and so are those that will be made."""
        self._on = False
        while self._loggers:
            self._loggers.pop().end()


_muted = _AllMuted()


class _Muted:
    """In place of ``log_metrics`` of a replacement's logger: until it has joined, its predecessor has written it all.

    Hyperparameters too log a metric, with TensorBoard, and a script may log them before `fit`. Others may wrap this one
    meanwhile, so in the end it stays, and passes on.
    """

    def __init__(self, logger: Logger) -> None:
        self._logger, self._write, self._muted = logger, logger.log_metrics, True
        self._before = vars(logger).get("log_metrics")  # someone's own
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
    if "_wandb_init" in vars(logger):  # its id is known to the run, not to the logger
        found["_id"] = logger.version
    return found
