"""The standard streams of a process that may lack one, or whose reader may have gone."""

import os
import sys
from contextlib import suppress


def complete() -> None:
    """Open the standard streams that this process was started without, as by ``>&-``. They lead nowhere."""
    for descriptor in range(3):
        try:
            os.fstat(descriptor)
        except OSError:
            nowhere = os.open(os.devnull, os.O_RDWR)
            if nowhere != descriptor:
                os.dup2(nowhere, descriptor)
                os.close(nowhere)
            os.set_inheritable(descriptor, True)
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        if getattr(sys, name) is None:
            setattr(sys, name, open(os.devnull, mode))  # noqa: SIM115


def flush() -> None:
    """Write out what stdout and stderr hold back. If nobody takes it, drop it.

    The interpreter would try once more when it ends, and would end with exit code 120 in place of this process's.
    """
    for stream in (sys.stdout, sys.stderr):
        try:
            if stream is not None:
                stream.flush()
        except (OSError, ValueError):  # no reader, no room on the disk, closed
            with suppress(OSError, ValueError):
                nowhere = os.open(os.devnull, os.O_WRONLY)
                os.dup2(nowhere, stream.fileno())
                os.close(nowhere)
