"""A thread in every rank that notices a new generation while the rank is busy or blocked."""

import logging
import threading
from collections.abc import Callable

from lightning_replica.control.generation import Generations
from lightning_replica.core import pending_work, points
from lightning_replica.errors import Interrupted

log = logging.getLogger(__name__)

_ALIVE_S = 1.0  # a caller that waits for the thread checks this often that it is alive


class Monitor:
    """Watches for the next generation and wakes the rank when it begins.

    The monitor looks at once when the rank asks for it, which the rank does repeatedly while it waits for others. While
    the rank is busy, the monitor looks seldom: each look costs CPU time here and in the process that serves the store.

    Args:
        generations: The log, on its own store connection: a store client serves one thread at a time.
        wake: Called once for every generation that begins, from the monitor's thread. Stops the device and aborts
            process groups.
        orphaned: Called if the store is gone, which means that the supervisor is gone.
        interval_s: How often the monitor looks when the rank does not ask, in seconds.
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
        """Start the thread, which watches for the generation after ``generation``."""
        self._generation = generation
        self._thread.start()

    def moved_to(self, generation: int) -> None:
        """Tell the monitor that this rank is in ``generation`` now."""
        with self._lock:
            self._generation = generation
            self._woken = min(self._woken, generation - 1)  # the rank may stay in the generation in which it was woken

    def stop(self) -> None:
        """Stop the thread and wait until it has ended."""
        self._stopped = True
        self._asked.set()
        self._thread.join()

    def wake_now(self) -> None:
        """Make the thread wake this rank, whose generation is over, and wait until it has done so.

        A rank calls this when it notices the end of its generation by itself. Its device must be stopped like all
        others, from another thread, and not later, when the rank has already continued.
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
        """Raise an error if this rank's generation is known to be over.

        Raises:
            Interrupted: If the generation is known to be over.
        """
        if self.over:
            raise Interrupted(f"generation {self._generation} is over")

    def check_now(self) -> None:
        """Do what `check` does, then make the thread look at once, for the next call. Called while the rank waits.

        Raises:
            Interrupted: If this rank's generation is known to be over.
        """
        self.check()
        self._asked.set()

    def _wake_rank(self) -> None:
        try:
            self._wake()
        except Exception:  # the thread must go on; what still works is found out by `Device.clean`
            log.exception("This rank could not be woken.")

    def _run(self) -> None:
        detector = pending_work.StallDetector()
        while True:
            if not self._asked.wait(self._interval_s):
                points.device_waits(detector.is_stalled())
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
                if begun and watched == self._generation:  # else the rank has moved to a new generation itself
                    self._woken = watched
                    self._wake_rank()
            if wanted:
                self._wanted = False
                self._done.set()
