"""Children end with their parent."""

import ctypes
import os
import signal
import sys

from lightning_replica.exit_codes import ORPHANED

__all__ = ["ORPHANED", "die_with"]

_PR_SET_PDEATHSIG = 1


def die_with(supervisor: int) -> None:
    """Ends this process when ``supervisor`` ends, as far as the platform can; the monitor does the rest."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != supervisor:
        sys.exit(ORPHANED)
