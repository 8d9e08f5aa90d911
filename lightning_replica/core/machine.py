"""This machine, as far as its processes can tell."""

import os
from pathlib import Path

_BOOT = Path("/proc/sys/kernel/random/boot_id")


def machine() -> int:
    """Return a number that processes have in common if they run under one kernel and see the same processes."""
    if not _BOOT.exists():
        return -1
    processes = os.stat("/proc/self/ns/pid").st_ino
    return (int(_BOOT.read_text().replace("-", ""), 16) ^ processes) % 2**62


def has_ended(pid: int) -> bool:
    """Return whether a process of this machine has ended. False where that cannot be seen."""
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except (FileNotFoundError, ProcessLookupError):
        return _BOOT.exists()
    return state in "ZX"  # nobody has asked how it ended yet
