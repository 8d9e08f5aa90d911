"""This machine, as far as its processes can tell."""

import contextlib
import os
from pathlib import Path

import psutil

_BOOT = Path("/proc/sys/kernel/random/boot_id")


def machine() -> int:
    """Return a number that processes have in common if they run under one kernel and see the same processes."""
    if not _BOOT.exists():
        return -1
    processes = os.stat("/proc/self/ns/pid").st_ino
    return (int(_BOOT.read_text().replace("-", ""), 16) ^ processes) % 2**62


def status_of(pid: int) -> str:
    """Return the status of a process, as `psutil` calls it; empty if it is gone, or does not let itself be seen."""
    with contextlib.suppress(psutil.Error):
        return str(psutil.Process(pid).status())
    return ""


def is_stopped(pid: int) -> bool:
    """Return whether a signal or a tracer has stopped a process."""
    return status_of(pid) in (psutil.STATUS_STOPPED, psutil.STATUS_TRACING_STOP)


def has_ended(pid: int) -> bool:
    """Return whether a process has ended, also if nobody has asked how."""
    status = status_of(pid)
    return status in (psutil.STATUS_ZOMBIE, psutil.STATUS_DEAD) if status else not psutil.pid_exists(pid)
