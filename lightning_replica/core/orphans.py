"""Makes child processes end with their parent."""

import ctypes
import os
import signal
import sys
from collections.abc import Callable
from functools import partial

from lightning_replica.exit_codes import ORPHANED

__all__ = ["ORPHANED", "die_with"]

_PR_SET_PDEATHSIG = 1
# Looked up at import: between fork and exec a process may do hardly more than call it.
_prctl = ctypes.CDLL(None).prctl if sys.platform == "linux" else None


def die_with(supervisor: int) -> None:
    """Make this process end when ``supervisor`` ends, where the platform can; elsewhere the monitor ends it."""
    end_with_parent()
    if os.getppid() != supervisor:
        sys.exit(ORPHANED)


def born_mortal() -> Callable[[], None] | None:
    """Return a ``preexec_fn`` for `subprocess.Popen` that makes the child end with this process.

    The setting survives `exec`. So it holds from the child's first instruction on, while the child imports, and in code
    of others. The kernel kills the child when the thread that started it ends, so that thread must last.
    """
    return None if _prctl is None else partial(_die_with, os.getpid())


def _die_with(parent: int) -> None:
    """Make the child end with its parent. Called in the child before `exec`."""
    end_with_parent()
    if os.getppid() != parent:  # the parent has already ended
        os._exit(ORPHANED)


def end_with_parent() -> None:
    """Make the kernel kill this process when its parent ends, even if this process is stopped; on Linux only."""
    if _prctl is not None:
        _prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
