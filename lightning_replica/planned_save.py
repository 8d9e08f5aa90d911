"""A checkpoint that someone asks a run for, while it goes on: SIGUSR2, or ``lightning-replica save``."""

import signal
import threading
from collections.abc import Callable
from typing import Any

SIGNAL = signal.SIGUSR2
LISTENS = "listens/{}"  # store key of a rank that can be sent `SIGNAL`: the generation that its process was born into


def ignore() -> None:
    """Has `SIGNAL` not end this process, as it would by default, before and after the time in which it is heard."""
    if threading.current_thread() is threading.main_thread() and signal.getsignal(SIGNAL) is signal.SIG_DFL:
        signal.signal(SIGNAL, signal.SIG_IGN)


class PlannedSave:
    """Notes that a checkpoint is wanted, until all ranks have agreed on it and have written it.

    One rank that was asked is enough. It keeps the request in mind until the checkpoint is there: if a rank is lost
    meanwhile, the next commit agrees on it anew.

    Args:
        write: Writes the checkpoint. Collective.

    Attributes:
        noted: Whether this rank was asked.
        agreed: Whether all ranks will write at the start of the next window.
    """

    def __init__(self, write: Callable[[], None]) -> None:
        self._write = write
        self.noted = self.agreed = False
        if threading.current_thread() is threading.main_thread():
            signal.signal(SIGNAL, self._note)

    def write(self) -> None:
        """Writes it."""
        self.agreed = False
        self._write()
        self.noted = False

    def _note(self, *_: Any) -> None:
        self.noted = True
