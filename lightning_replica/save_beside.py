"""A checkpoint that goes to the disk while training goes on."""

import threading
from collections.abc import Callable

from lightning_replica import points

_SLICE_S = 0.02


class SaveBeside:
    """Writes in a thread of its own.

    The thread uses no process group, so no recovery waits for it: it ends by itself once the generation is over in
    which it began, and then the checkpoint is not published.

    Args:
        write: Writes and publishes.
        waits: Whether the thread waits for other ranks just now.
    """

    def __init__(self, write: Callable[[], None], waits: Callable[[], bool]) -> None:
        self._write, self._waits = write, waits
        self._failed: Exception | None = None
        # No daemon: the interpreter waits for it, as c10d's store must not be in use when it ends.
        self._thread = threading.Thread(target=self._run, name="lightning_replica-save")
        self._thread.start()

    def wait(self, check: Callable[[], None]) -> Exception | None:
        """Wait for the end, and return what went wrong. While the thread waits for other ranks, so does this one.

        Args:
            check: Called again and again; may raise.
        """
        try:
            while self._thread.is_alive():
                check()
                if self._waits():
                    points.waits()
                else:
                    points.goes_on()
                self._thread.join(_SLICE_S)
        finally:
            points.goes_on()
        return self._failed

    def _run(self) -> None:
        try:
            with points.beside_training():
                self._write()
        except Exception as error:  # told by `wait`, on the rank's own thread
            self._failed = error
