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
    """

    def __init__(self, write: Callable[[], None]) -> None:
        self._write = write
        self._failed: Exception | None = None
        # No daemon: the interpreter waits for it, as c10d's store must not be in use when it ends.
        self._thread = threading.Thread(target=self._run, name="lightning_replica-save")
        self._thread.start()

    def wait(self, check: Callable[[], None]) -> Exception | None:
        """Waits for the end; returns what went wrong.

        Args:
            check: Called again and again; may raise.
        """
        while self._thread.is_alive():
            check()
            self._thread.join(_SLICE_S)
        return self._failed

    def _run(self) -> None:
        try:
            with points.beside_training():
                self._write()
        except Exception as error:  # told by `wait`, on the rank's own thread
            self._failed = error
