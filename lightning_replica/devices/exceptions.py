"""Helpers that read exceptions."""

from collections.abc import Iterator


def with_causes(error: BaseException | None) -> Iterator[BaseException]:
    """Yield ``error`` and its causes: a device's error may be the cause of a collective's failure."""
    while error is not None:
        yield error
        error = error.__cause__


def first_line(error: BaseException) -> str:
    """Return the first line of the message, or the name of the class if there is no message."""
    return (str(error).splitlines() or [type(error).__name__])[0]
