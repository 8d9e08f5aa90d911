"""Kills workers of a DataLoader that hang in the fork that made them.

[Note: forks that hang]
In Python before 3.10.15, and 3.11 before 3.11.7, a process that is forked while another thread begins to use Python
waits for ever for a lock that the other thread held (python/cpython#112275). Threads of gloo do so when they drop the
last reference to a tensor. torch waits for such a worker for ever, too, as it is alive. Here a worker writes that it
has begun. One that does not is killed. The rank then gets the error of a worker that has died, and recovers from that.
"""

import multiprocessing
import sys
import threading
from collections.abc import Callable, Sequence
from typing import Any, Final

import torch

from lightning_replica._compat.cpython import FORKS_MAY_HANG
from lightning_replica.core.messages import warn

MAY_HANG: Final = FORKS_MAY_HANG
_BEGIN_S: Final = 30.0


class Forks:
    """Watches the workers of one iterator from their fork to their first line.

    Args:
        workers: The number of workers.
    """

    def __init__(self, workers: int) -> None:
        self._begun = torch.zeros(workers, dtype=torch.uint8).share_memory_()
        self._timer: threading.Timer | None = None

    def before(self, init: Callable[[int], None]) -> Callable[[int], None]:
        """Return a ``worker_init_fn`` that writes that the worker has begun, and calls ``init``."""

        def begin(worker: int) -> None:
            self._begun[worker] = 1
            init(worker)

        return begin

    def watch(self, processes: Sequence[Any]) -> None:
        """Kill those of these workers that have not begun after a while."""
        self._timer = threading.Timer(_BEGIN_S, self._kill, (tuple(processes),))
        self._timer.daemon = True
        self._timer.start()

    def end(self) -> None:
        """Watch no longer."""
        if self._timer is not None:
            self._timer.cancel()

    def _kill(self, processes: Sequence[Any]) -> None:
        for begun, process in zip(self._begun.tolist(), processes, strict=True):
            if not begun and process.is_alive():
                warn(
                    f"process {process.pid}, a worker of a DataLoader, has not begun within {_BEGIN_S:g} s, and is"
                    f" killed. A fork by Python {sys.version.split()[0]} can hang (python/cpython#112275). 3.10.15,"
                    " 3.11.7 and later versions have no such fault."
                )
                process.kill()


def forks_of(loader: Any) -> Forks | None:
    """Return what watches the workers of a loader; None if they are not forked, or if forks of this Python end."""
    if not MAY_HANG or not loader.num_workers:
        return None
    context = loader.multiprocessing_context or multiprocessing
    return Forks(loader.num_workers) if context.get_start_method() == "fork" else None
