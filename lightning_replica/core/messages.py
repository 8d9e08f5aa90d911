"""Messages for the user, logged where Lightning logs its own."""

import logging
import sys
from collections.abc import Callable
from contextlib import suppress
from typing import TextIO

from lightning_replica._compat.packages import chosen

_CLEAR_LINE = "\r\x1b[2K"
_below = 0


def _log() -> logging.Logger:
    """Return a child of the logger that Lightning gives a handler, so that the lines appear where Lightning's do."""
    return logging.getLogger(f"{chosen().pytorch}.replica_zero")


def _info(text: str) -> None:
    _log().info("%s", text)


def leave_room(lines: int) -> None:
    """Leave ``lines`` empty lines below messages on a terminal: a progress bar of several lines is drawn upwards."""
    global _below
    _below = lines


def say(message: str) -> None:
    """Log one line of information for the user. Any process may call this."""
    with_bars(f"replica_zero: {message}", _info)


def warn(message: str) -> None:
    """Log one line that needs the user's attention. Any process may call this."""
    with_bars(f"replica_zero: {message}", _log().warning)


def with_bars(text: str, write: Callable[[str], object]) -> None:
    """Write lines while other processes draw progress bars: on a terminal, the lines replace a bar.

    The other process draws the bar again below the lines.

    Args:
        text: The lines.
        write: Writes the lines, and ends the last one.
    """
    terminal = sys.__stderr__ if sys.__stderr__ is not None and sys.__stderr__.isatty() else None
    _to(terminal, _CLEAR_LINE)
    with suppress(OSError):
        write(text)
    _to(terminal, "\n" * _below)


def _to(terminal: TextIO | None, text: str) -> None:
    if terminal is not None and text:
        with suppress(OSError):  # it may have been closed
            terminal.write(text)
            terminal.flush()
