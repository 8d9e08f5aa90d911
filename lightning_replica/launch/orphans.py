"""Children end with their parent."""

import ctypes
import os
import signal
import sys

ORPHANED = 70  # exit code of a process whose supervisor is gone
_PR_SET_PDEATHSIG = 1


def die_with(supervisor: int) -> None:
    """Ends this process when ``supervisor`` ends, as far as the platform can; the monitor does the rest."""
    end_with_parent()
    if os.getppid() != supervisor:
        sys.exit(ORPHANED)


def end_with_parent() -> None:
    """Has the kernel kill this process when its parent ends, even if it is stopped; on Linux only."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
