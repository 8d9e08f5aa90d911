"""A replacement's loggers go on with the runs of its predecessor: no second directory, no second run.

Loggers choose a version, or are given an id, when they begin. Every rank leaves in the store what its own have got, and
its replacement puts that into its loggers before anything asks them.
"""

from collections.abc import Callable, Iterable, Sequence
from typing import Any

from lightning.pytorch.loggers import CSVLogger, Logger

from lightning_replica._compat.lightning import continue_csv
from lightning_replica.errors import RecoveryError

# Where loggers keep what names their run: CSV, TensorBoard and Lightning's own; Weights & Biases; MLflow; Comet.
_NAMES = ("_version", "_id", "_run_id", "_experiment_id", "_experiment_key")


def record(loggers: Iterable[Logger]) -> list[dict[str, Any]]:
    """What names the runs of ``loggers``, as plain data; asks none of them for anything that it has not chosen yet."""
    return [{"class": type(logger).__name__, "names": _names(logger)} for logger in loggers]


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
        vars(logger).update(run["names"])
        options = vars(logger).get("_wandb_init")
        if options is not None:
            options.update(id=run["names"].get("_id"), resume="allow")
        if writes and isinstance(logger, CSVLogger):
            continue_csv(logger)


def mute(loggers: Iterable[Logger]) -> Callable[[], None]:
    """Have ``loggers`` write no metrics: a predecessor has written them.

    Returns:
        A function that ends it.
    """
    muted = [logger for logger in loggers if "log_metrics" not in vars(logger)]
    for logger in muted:
        vars(logger)["log_metrics"] = _write_nothing

    def end() -> None:
        for logger in muted:
            del vars(logger)["log_metrics"]

    return end


def _write_nothing(*_: Any, **__: Any) -> None:
    """In place of ``log_metrics``."""


def _names(logger: Logger) -> dict[str, Any]:
    found = {name: vars(logger)[name] for name in _NAMES if isinstance(vars(logger).get(name), (str, int))}
    if "_wandb_init" in vars(logger):  # its id is known to the run, not to the logger
        found["_id"] = logger.version
    return found
