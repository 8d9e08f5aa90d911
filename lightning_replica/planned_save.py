"""A checkpoint that someone asks a run for, while it goes on: SIGUSR2, or ``lightning-replica save``.

[Note: who can be asked]
The signal ends whoever is not prepared for it, and that a process has a handler says little: a shell with a trap for
its exit handles every signal, and then ends. So a process that can be asked holds an abstract socket (Linux) whose name
has its process id and the time of its start. The kernel lists such names in /proc and removes each with its process; no
other process has both numbers. Nobody ever connects to it.
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
LISTENS = "listens/{}"  # store key of a rank that can be sent `SIGNAL`: the generation that its process was born into


def ignore() -> None:
    """Has `SIGNAL` not end this process, as it would by default, before and after the time in which it is heard."""
    if threading.current_thread() is threading.main_thread() and signal.getsignal(SIGNAL) is signal.SIG_DFL:
        signal.signal(SIGNAL, signal.SIG_IGN)


@contextmanager
def listening() -> Iterator[None]:
    """Lets others see that this process can be asked, while the block runs. See [Note: who can be asked]."""
    marker = _marker()
    try:
        yield
    finally:
        if marker is not None:
            marker.close()


def listens(pid: int) -> bool:
    """Return whether the process ``pid`` is a run, or a rank of one, that can be asked.

    Raises:
        OSError: If there is no such process, or nobody can say (/proc, which only Linux has).
    """
    mark = f"@{_mark(pid)}"
    lines = Path(f"/proc/{pid}/net/unix").read_text(errors="replace").splitlines()
    return any(line.endswith(f" {mark}") for line in lines)


class PlannedSave:
    """Notes that a checkpoint is wanted, until all ranks have agreed on it and have written it.

    One rank that was asked is enough. It keeps the request in mind until the checkpoint is there: if a rank is lost
    meanwhile, the next commit agrees on it anew.

    Args:
        write: Writes the checkpoint. Collective.

    Attributes:
        noted: Whether this rank was asked.
        agreed: Whether all ranks will write at the start of the next window.
    """

    def __init__(self, write: Callable[[], None]) -> None:
        self._write = write
        self.noted = self.agreed = False
        if threading.current_thread() is threading.main_thread():
            signal.signal(SIGNAL, self._note)
            _listen_from_now_on()

    def write(self) -> None:
        """Writes it."""
        self.agreed = False
        self._write()
        self.noted = False

    def _note(self, *_: Any) -> None:
        self.noted = True


_held: tuple[int, socket.socket] | None = None  # by which process, as a fork inherits it


def _listen_from_now_on() -> None:
    global _held
    marker = None if _held is not None and _held[0] == os.getpid() else _marker()
    if marker is not None:
        _held = os.getpid(), marker


def _marker() -> socket.socket | None:
    """A socket that marks this process; None where there can be none, and then `listens` is false."""
    if sys.platform != "linux":
        return None
    try:
        with ExitStack() as stack:
            marker = stack.enter_context(socket.socket(socket.AF_UNIX))
            marker.bind(f"\0{_mark(os.getpid())}")
            stack.pop_all()
    except OSError as error:
        log.debug("nobody sees that this process can be asked to save: %s", error)
        return None
    return marker


def _mark(pid: int) -> str:
    """The name of the socket: the process's id as it sees that itself, and when it began, in ticks of the kernel's."""
    status = dict(line.split(":", 1) for line in Path(f"/proc/{pid}/status").read_text().splitlines())
    began = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[19]
    return f"lightning_replica/{status.get('NSpid', str(pid)).split()[-1]}/{began}"
