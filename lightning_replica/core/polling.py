"""Waiting for other processes where nothing but asking again tells that they have come."""

import time
from collections.abc import Callable
from typing import Final

from lightning_replica.core import points

_FIRST_S: Final = 0.001
_LONGEST_S: Final = 0.02


def poll(
    ready: Callable[[], bool],
    meanwhile: Callable[[], None] = lambda: None,
    first_s: float = _FIRST_S,
    longest_s: float = _LONGEST_S,
) -> None:
    """Ask until ``ready()`` returns true, and tell the watcher that this rank waits.

    Args:
        ready: Returns whether the wait is over.
        meanwhile: Called whenever it is not. It may raise, which ends the wait.
        first_s: Pause after the first question, in seconds. The pauses grow by half.
        longest_s: The longest pause, in seconds.
    """
    pause_s = first_s
    try:
        while not ready():
            points.waits()
            meanwhile()
            time.sleep(pause_s)
            pause_s = min(longest_s, 1.5 * pause_s)
    finally:
        points.goes_on()
