"""Lines for the user, among Lightning's own."""

import logging
import sys
from collections.abc import Callable

# A child of the logger that Lightning gives a handler, so that the lines appear where Lightning's do.
_log = logging.getLogger("lightning.pytorch.replica_zero")

_CLEAR_LINE = "\r\x1b[2K"
_below = 0


def _info(text: str) -> None:
    _log.info("%s", text)


def leave_room(lines: int) -> None:
    """Leave ``lines`` empty lines below messages on a terminal: a progress bar of several lines is drawn upwards."""
    global _below
    _below = lines


def say(message: str) -> None:
    """Says one line, from whichever process calls it."""
    with_bars(f"replica_zero: {message}", _info)


def warn(message: str) -> None:
    """Say one line of something that needs attention, from whichever process calls it."""
    with_bars(f"replica_zero: {message}", _log.warning)


def with_bars(text: str, write: Callable[[str], object]) -> None:
    """Write lines to where progress bars are, which other processes draw: on a terminal, in place of a bar.

    The bar is drawn anew below it.

    Args:
        text: The lines.
        write: Writes them, and ends the last.
    """
    terminal = sys.__stderr__ if sys.__stderr__ is not None and sys.__stderr__.isatty() else None
    if terminal is not None:
        terminal.write(_CLEAR_LINE)
        terminal.flush()
    write(text)
    if terminal is not None and _below:
        terminal.write("\n" * _below)
        terminal.flush()
