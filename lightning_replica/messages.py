"""Lines for the user, among Lightning's own."""

import logging

# A child of the logger that Lightning gives a handler, so that the lines appear where Lightning's do.
_log = logging.getLogger("lightning.pytorch.replica_zero")


def say(message: str) -> None:
    """Says one line, from whichever process calls it."""
    _log.info("replica_zero: %s", message)


def warn(message: str) -> None:
    """Say one line of something that needs attention, from whichever process calls it."""
    _log.warning("replica_zero: %s", message)
