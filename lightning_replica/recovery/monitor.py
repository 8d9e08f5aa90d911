"""A thread in every rank that sees the world move on while the rank is busy or blocked."""

import threading
from collections.abc import Callable

from lightning_replica.errors import Interrupted
from lightning_replica.recovery.generation import Generations


class Monitor:
    """Watches for the next generation and wakes the rank.

    Args:
        generations: On a store connection of its own: a store client serves one thread at a time.
        wake: Called once for every generation that begins, from the monitor's thread. Aborts process groups.
        orphaned: Called if the store is gone, which means that the supervisor is.
        interval_s: How often it looks.
    """

    def __init__(
        self,
        generations: Generations,
        wake: Callable[[], None],
        orphaned: Callable[[], None],
        interval_s: float = 0.02,
    ) -> None:
        self._generations, self._wake, self._orphaned = generations, wake, orphaned
        self._interval_s = interval_s
        self._generation = 0
        self._woken = -1
        self._stop = threading.Event()
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

    def stop(self) -> None:
        """Ends the thread."""
        self._stop.set()
        self._thread.join()

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

    def _run(self) -> None:
        while not self._stop.wait(self._interval_s):
            generation = self._generation
            try:
                begun = self._woken < generation and self._generations.begun(generation + 1)
            except RuntimeError:  # c10d's DistNetworkError and DistStoreError
                if not self._stop.is_set():
                    self._orphaned()
                return
            if begun:
                with self._lock:
                    if self._generation == generation:  # else the rank has moved on by itself meanwhile
                        self._woken = generation
                        self._wake()
