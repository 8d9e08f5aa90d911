"""A thread in every rank that sees the world move on while the rank is busy or blocked."""

import threading
from collections.abc import Callable

from lightning_replica.errors import Interrupted
from lightning_replica.recovery.generation import Generations

_ALIVE_S = 1.0  # how often who waits for the thread looks whether it is still there


class Monitor:
    """Watches for the next generation and wakes the rank.

    It looks at once where the rank asks for it, which it does again and again while it waits for others, and seldom
    while the rank is busy: each look costs CPU time here and where the store is.

    Args:
        generations: On a store connection of its own: a store client serves one thread at a time.
        wake: Called once for every generation that begins, from the monitor's thread. Stops the device and aborts
            process groups.
        orphaned: Called if the store is gone, which means that the supervisor is.
        interval_s: How often it looks by itself.
    """

    def __init__(
        self,
        generations: Generations,
        wake: Callable[[], None],
        orphaned: Callable[[], None],
        interval_s: float = 0.5,
    ) -> None:
        self._generations, self._wake, self._orphaned = generations, wake, orphaned
        self._interval_s = interval_s
        self._generation = 0
        self._woken = -1
        self._stopped, self._asked = False, threading.Event()
        self._wanted, self._done = False, threading.Event()
        self._lock = threading.Lock()
        self._thread = threading.Thread(target=self._run, name="lightning_replica-monitor", daemon=True)

    def start(self, generation: int) -> None:
        """Begins to watch for the generation after ``generation``."""
        self._generation = generation
        self._thread.start()

    def moved_to(self, generation: int) -> None:
        """Tells the monitor that this rank is in ``generation`` now."""
        with self._lock:
            self._generation = generation
            self._woken = min(self._woken, generation - 1)  # whoever asked to be woken may still be in the same one

    def stop(self) -> None:
        """Ends the thread."""
        self._stopped = True
        self._asked.set()
        self._thread.join()

    def wake_now(self) -> None:
        """Has the thread wake this rank, whose generation is over, and waits until it has.

        For a rank that sees the end of its generation by itself: its device must be stopped like all others, from
        another thread, and not at some later time, when it has gone on already.
        """
        self._done.clear()
        self._wanted = True
        self._asked.set()
        while self._thread.is_alive() and not self._done.wait(_ALIVE_S):
            pass

    @property
    def over(self) -> bool:
        """Whether this rank's generation is known to be over."""
        return self._woken >= self._generation

    def check(self) -> None:
        """Raises if this rank's generation is over.

        Raises:
            Interrupted: If it is.
        """
        if self.over:
            raise Interrupted(f"generation {self._generation} is over")

    def look(self) -> None:
        """Like `check`, for a rank that waits: has the thread look now, for the next time.

        Raises:
            Interrupted: If this rank's generation is known to be over.
        """
        self.check()
        self._asked.set()

    def _run(self) -> None:
        while True:
            self._asked.wait(self._interval_s)
            self._asked.clear()
            if self._stopped:
                return
            watched, wanted = self._generation, self._wanted
            try:
                begun = wanted or (self._woken < watched and self._generations.begun(watched + 1))
            except RuntimeError:  # c10d's DistNetworkError and DistStoreError
                if not self._stopped:
                    self._orphaned()
                return
            with self._lock:
                if begun and watched == self._generation:  # else the rank has moved on by itself
                    self._woken = watched
                    self._wake()
            if wanted:
                self._wanted = False
                self._done.set()
