"""A checkpoint that is written to the disk while training continues."""

import threading
from collections.abc import Callable

from lightning_replica.core import points

_SLICE_S = 0.02


class AsyncSave:
    """Writes a checkpoint in a thread of its own.

    The thread uses no process group, so no recovery waits for it. It ends by itself once the generation in which it
    began is over. The checkpoint is not published then.

    Args:
        write: Writes and publishes the checkpoint.
        waits: Returns whether the thread waits for other ranks at the moment.
    """

    def __init__(self, write: Callable[[], None], waits: Callable[[], bool]) -> None:
        self._write, self._waits = write, waits
        self._failed: Exception | None = None
        # Not a daemon: the interpreter waits for the thread, because c10d's store must not be in use when it exits.
        self._thread = threading.Thread(target=self._run, name="lightning_replica-save")
        self._thread.start()

    def wait(self, check: Callable[[], None]) -> Exception | None:
        """Wait for the thread, and return its error. While it waits for other ranks, this rank counts as waiting too.

        Args:
            check: Called repeatedly; may raise.
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
            with points.off_training_path():
                self._write()
        except Exception as error:  # `wait` returns it, on the rank's own thread
            self._failed = error
