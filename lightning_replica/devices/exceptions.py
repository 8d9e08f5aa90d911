"""Helpers that read exceptions."""

from collections.abc import Iterator
from typing import Final

from lightning_replica.devices.gloo import is_collective_failure
from lightning_replica.errors import CollectiveError, Interrupted, RecoveryError

_OF_OTHERS: Final = (CollectiveError, Interrupted, RecoveryError)


def explain(error: BaseException) -> str:
    """Return the type and the message of an exception."""
    return f"{type(error).__name__}: {error}"


def is_of_others(error: BaseException) -> bool:
    """Return whether a process that ends with ``error`` ends because of another process."""
    return isinstance(error, _OF_OTHERS) or is_collective_failure(error)


def with_causes(error: BaseException | None) -> Iterator[BaseException]:
    """Yield ``error`` and its causes: a device's error may be the cause of a collective's failure."""
    while error is not None:
        yield error
        error = error.__cause__


def first_line(error: BaseException) -> str:
    """Return the first line of the message, or the name of the class if there is no message."""
    return (str(error).splitlines() or [type(error).__name__])[0]
