"""Rank processes forked from one that has imported torch and lightning: tens of milliseconds instead of seconds."""

import atexit
import gc
import multiprocessing
import os
import sys
import threading
import weakref
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

from lightning_replica._compat.cpython import mend_forks

# The rest is what fits import on their way: megatron-core takes two seconds, Lightning's look for object storage a
# third of one.
_PRELOAD = [
    "lightning_replica",
    "tests.support.job",
    "tests.megatron.imported",
    "omegaconf",
    "s3fs",
    "torch.utils.serialization.config",
]


def context() -> Any:
    """Return the context in which processes are forked from the one that has imported everything."""
    found = multiprocessing.get_context("forkserver")
    found.set_forkserver_preload(_PRELOAD)
    return found


def _enter(environment: dict[str, str], log: str, target: Callable[..., None], args: tuple[Any, ...]) -> None:
    mend_forks()  # those of DDP, too
    gc.freeze()  # or the first full collection looks at all that was imported, and so copies 100 MB of its pages
    finalize: Any = weakref.finalize
    for known in finalize._registry:  # torch's libraries, which would be taken apart function by function
        known.atexit = False
    os.environ.clear()
    os.environ.update(environment)
    os.environ["LIGHTNING_REPLICA_SUPERVISOR"] = str(os.getppid())  # the fork server
    multiprocessing.set_start_method("fork", force=True)  # for DataLoader workers, as in ranks that users start
    with open(log, "ab", buffering=0) as file:
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
    sys.stdin = open(os.devnull)  # noqa: SIM115
    try:
        target(*args)
    except Exception:
        sys.excepthook(*sys.exc_info())  # as the interpreter would, which knows no other
        sys.exit(1)
    finally:
        atexit._run_exitfuncs()  # where ranks say goodbye; multiprocessing ends with os._exit (before Python 3.14)


class ForkedProcess:
    """One forked process, as the supervisor wants it."""

    def __init__(self, environment: dict[str, str], log: Path, target: Callable[..., None], *args: Any) -> None:
        self._process = context().Process(target=_enter, args=(environment, str(log), target, args))
        self._process.start()
        self._lock = threading.Lock()
        self.returncode: int | None = None

    @property
    def pid(self) -> int:
        pid = self._process.pid
        assert pid is not None
        return int(pid)

    def wait(self) -> int:
        with self._lock:
            self._process.join()
            self.returncode = self._process.exitcode
        assert self.returncode is not None
        return self.returncode

    def poll(self) -> int | None:
        return self.returncode

    def send_signal(self, signum: int) -> None:
        if self.returncode is None:
            with suppress(ProcessLookupError):  # it has ended, and `wait` is about to know
                os.kill(self._process.pid, signum)
