"""Children end with their parent."""

import ctypes
import os
import signal
import sys
from collections.abc import Callable
from functools import partial

ORPHANED = 70  # exit code of a process whose supervisor is gone
_PR_SET_PDEATHSIG = 1
# Looked up here: between fork and exec a process may do hardly more than call it.
_prctl = ctypes.CDLL(None).prctl if sys.platform == "linux" else None


def die_with(supervisor: int) -> None:
    """Ends this process when ``supervisor`` ends, as far as the platform can; the monitor does the rest."""
    end_with_parent()
    if os.getppid() != supervisor:
        sys.exit(ORPHANED)


def born_mortal() -> Callable[[], None] | None:
    """Return what `subprocess.Popen` is to call as ``preexec_fn``, so that the child ends with this process.

    The kernel keeps the promise through `exec`, so it holds from the child's first instruction on, while it imports,
    and in code that is not ours. It holds for the thread that starts the child: that must be the one that lasts.
    """
    return None if _prctl is None else partial(_die_with, os.getpid())


def _die_with(parent: int) -> None:
    """Run in the child before `exec`."""
    end_with_parent()
    if os.getppid() != parent:  # it has ended in between
        os._exit(ORPHANED)


def end_with_parent() -> None:
    """Has the kernel kill this process when its parent ends, even if it is stopped; on Linux only."""
    if _prctl is not None:
        _prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
