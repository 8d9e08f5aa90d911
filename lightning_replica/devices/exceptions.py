"""Reading exceptions."""

from collections.abc import Iterator


def with_causes(error: BaseException | None) -> Iterator[BaseException]:
    """``error`` and what it was raised from: a collective's failure may have come from an error of the device."""
    while error is not None:
        yield error
        error = error.__cause__


def first_line(error: BaseException) -> str:
    """The first line of the message, or the name of the class where there is none."""
    return (str(error).splitlines() or [type(error).__name__])[0]
