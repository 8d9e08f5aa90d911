"""Checkpoints that a user requests from a running job, with SIGUSR2 or ``lightning-replica save``.

[Note: who can be asked]
The signal ends every process that is not prepared for it. A handler does not prove that a process is prepared: a shell
with a trap for its exit handles every signal, and then ends. So a process that can be asked holds an abstract socket
(Linux) whose name contains its process id and its start time. The kernel lists such names in /proc and removes each
name with its process. No other process has both numbers. No process ever connects to the socket.
"""

import logging
import os
import signal
import socket
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

log = logging.getLogger(__name__)

SIGNAL = signal.SIGUSR2


def ignore() -> None:
    """Ignore `SIGNAL` if its action is the default, which ends the process: before and after `PlannedSave` listens."""
    if threading.current_thread() is threading.main_thread() and signal.getsignal(SIGNAL) is signal.SIG_DFL:
        signal.signal(SIGNAL, signal.SIG_IGN)


@contextmanager
def listening() -> Iterator[None]:
    """Show other processes that this one can be asked, while the block runs. See [Note: who can be asked]."""
    marker = _marker()
    try:
        yield
    finally:
        if marker is not None:
            marker.close()


def listens(pid: int) -> bool:
    """Return whether the process ``pid`` is a run, or a rank of one, that can be asked.

    Raises:
        OSError: If there is no such process, or if there is no /proc, which only Linux has.
    """
    mark = f"@{_mark(pid)}"
    lines = Path(f"/proc/{pid}/net/unix").read_text(errors="replace").splitlines()
    return any(line.endswith(f" {mark}") for line in lines)


class PlannedSave:
    """Keeps a request for a checkpoint until all ranks have agreed on it and have written it.

    It is enough to ask one rank. That rank keeps the request until the checkpoint is written. If a rank is lost in the
    meantime, the ranks agree on the request again in the next commit.

    Args:
        write: Writes the checkpoint. Collective.

    Attributes:
        noted: Whether this rank was asked.
    """

    def __init__(self, write: Callable[[], None]) -> None:
        self._write = write
        self.noted = self._agreed = False
        if threading.current_thread() is threading.main_thread():
            signal.signal(SIGNAL, self._note)
            _listen_from_now_on()

    def agree(self, requests: float) -> None:
        """Note what the ranks have agreed on: to write at the start of the next window if any of them was asked."""
        self._agreed = requests > 0

    def withdraw(self) -> None:
        """Drop the agreement after a fault, as a replacement has no part in it; the next commit agrees again."""
        self._agreed = False

    @property
    def is_due(self) -> bool:
        """Whether all ranks must write at the start of this window."""
        return self._agreed

    def write(self) -> None:
        """Write the checkpoint, and drop the request."""
        self._agreed = False
        self._write()
        self.noted = False

    def _note(self, *_: Any) -> None:
        self.noted = True


_held: tuple[int, socket.socket] | None = None  # with the id of the process that made it, as a fork inherits it


def _listen_from_now_on() -> None:
    global _held
    marker = None if _held is not None and _held[0] == os.getpid() else _marker()
    if marker is not None:
        _held = os.getpid(), marker


def _marker() -> socket.socket | None:
    """Return a socket that marks this process; None if there can be none, and then `listens` returns false."""
    if sys.platform != "linux":
        return None
    try:
        with ExitStack() as stack:
            marker = stack.enter_context(socket.socket(socket.AF_UNIX))
            marker.bind(f"\0{_mark(os.getpid())}")
            stack.pop_all()
    except OSError as error:
        log.debug("other processes cannot see that this one can be asked to save: %s", error)
        return None
    return marker


def _mark(pid: int) -> str:
    """Return the socket's name: the process's id in its own namespace, and its start time in ticks of the kernel."""
    status = dict(line.split(":", 1) for line in Path(f"/proc/{pid}/status").read_text().splitlines())
    began = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[19]
    return f"lightning_replica/{status.get('NSpid', str(pid)).split()[-1]}/{began}"
