"""One run at a time writes to a directory of checkpoints: its ranks hold locks on a file there as long as they live.

The file also shows whether all ranks see one directory. Nodes that mount different disks at one path would each write a
part of every checkpoint, and none would be whole.

[Note: locks]
Rank 0 locks the file exclusively, writes who it is, and turns the lock into a shared one, which every rank gets. So a
run that starts finds the file locked while any process of another run lives: also while survivors write a last
checkpoint without their rank 0. The operating system ends the lock of a process that dies. Locks are those of
``fcntl.lockf``, which children do not inherit, and which network file systems pass to their server. They end when the
process closes the file, wherever it was opened: so nothing else opens it. A process keeps them to its end, over all
fits of its script. Where a file system has no locks, nothing keeps two runs apart.
"""

import errno
import fcntl
import json
import logging
import os
import secrets
import socket
import time
from contextlib import suppress
from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from typing import Final

from lightning_replica.checkpoint import publish
from lightning_replica.core.limited import within
from lightning_replica.core.messages import say
from lightning_replica.errors import ConfigurationError

log = logging.getLogger(__name__)

LEASE: Final = ".lease"
# In which a run that was told to end writes its last checkpoint, and a server of NFS forgets a machine that has died.
_GRACE_S: Final = 120.0
_ANSWERS_S: Final = 10.0  # after which a server of locks is taken for unreachable
_SEEN_S: Final = 20.0  # after which a network file system shows to one machine what another has written
_POLL_S: Final = 0.2
_TAKEN: Final = (errno.EACCES, errno.EAGAIN)


class _Lock(Enum):
    """Who has a lock: this process, others, or nobody, as the file system has none or its server does not answer."""

    OWN = 1
    OF_OTHERS = 2
    NONE = 3


@dataclass(frozen=True)
class _Held:
    """A lease that this process holds: its file, which stays open, and its token."""

    file: int
    token: str


_held: dict[Path, _Held] = {}


def take(directory: Path, grace_s: float = _GRACE_S) -> str:
    """Take the lease of a directory for a new run, and create the directory if need be. One rank calls this.

    Args:
        directory: The directory.
        grace_s: How long to wait for another run to end, in seconds.

    Returns:
        A token, which the other ranks need for `share`.

    Raises:
        ConfigurationError: If another run holds it.
        CheckpointError: If the file cannot be made.
        OSError: If the file cannot be written.
    """
    place = directory.resolve() / LEASE
    if place in _held:
        return _held[place].token
    with publish.naming(directory):
        publish.make_directory(directory)
    with publish.naming(place):
        file = os.open(place, os.O_RDWR | os.O_CREAT, 0o666)
    try:
        _let_others_write(file, directory)
        if _wait_for_others(file, directory, grace_s) is _Lock.NONE:
            log.warning(
                "%s is on a file system without locks: nothing keeps a second run from writing there.", directory
            )
        token = secrets.token_hex(8)
        about = {"token": token, "host": socket.gethostname(), "pid": os.getpid()}
        os.ftruncate(file, 0)
        os.pwrite(file, json.dumps(about).encode(), 0)
        os.fsync(file)
        _lock(file, fcntl.LOCK_SH)
    except BaseException:
        os.close(file)
        raise
    _held[place] = _Held(file, token)
    return token


def keep(directory: Path) -> None:
    """Take the lease again if somebody has removed its file since this process got it. Called before each save.

    Raises:
        ConfigurationError: If another run has taken it.
        CheckpointError: If the file cannot be made.
        OSError: If the file cannot be written.
    """
    place = directory.resolve() / LEASE
    held = _held.get(place)
    if held is None or _is_at(held.file, place):
        return
    del _held[place]
    try:
        take(directory, 0.0)
    except BaseException:
        _held[place] = held
        raise
    os.close(held.file)
    log.warning("%s was removed while this run writes checkpoints there. It was made again.", place)


def _is_at(file: int, place: Path) -> bool:
    try:
        return os.path.samestat(os.fstat(file), os.stat(place))
    except (FileNotFoundError, NotADirectoryError):
        return False


def share(directory: Path, token: str, seen_s: float = _SEEN_S) -> bool:
    """Share the lease that rank 0 of this run has taken.

    Args:
        directory: The directory.
        token: What `take` has returned on rank 0.
        seen_s: How long to wait until the file that rank 0 has written is seen here, in seconds.

    Returns:
        Whether this process sees that file. If not, this is another directory than that of rank 0.
    """
    place = directory.resolve() / LEASE
    if place in _held:
        return _held[place].token == token
    deadline = time.monotonic() + seen_s
    while True:
        try:
            file = os.open(place, os.O_RDONLY)
        except OSError:
            file = -1
        if file >= 0:
            if _about(file).get("token") == token:
                _lock(file, fcntl.LOCK_SH)
                _held[place] = _Held(file, token)
                return True
            os.close(file)
        if time.monotonic() > deadline:
            return False
        time.sleep(_POLL_S)


def _wait_for_others(file: int, directory: Path, grace_s: float) -> _Lock:
    deadline, announced = time.monotonic() + grace_s, False
    while (found := _lock(file, fcntl.LOCK_EX)) is _Lock.OF_OTHERS:
        about = _about(file)
        who = f"of process {about.get('pid', 'unknown')} on {about.get('host', 'an unknown host')}"
        if time.monotonic() > deadline:
            raise ConfigurationError(
                f"Another run, {who}, writes to dirpath={str(directory)!r}. Two runs would remove each other's"
                " checkpoints. End that run, or give this one another directory. If that run's machine is lost, remove"
                f" {directory / LEASE}."
            )
        if not announced:
            say(f"waits for another run, {who}, which still writes to {directory}, for up to {grace_s:g} s.")
            announced = True
        time.sleep(_POLL_S)
    return found


def _let_others_write(file: int, directory: Path) -> None:
    """Let those who may write to the directory take the lease in later runs."""
    if os.fstat(file).st_uid != os.geteuid():
        return
    with suppress(OSError):  # some file systems have no modes
        os.fchmod(file, 0o600 | (directory.stat().st_mode & 0o066))


def _lock(file: int, kind: int) -> _Lock:
    """Lock a file, and return what came of it."""
    try:
        # The call waits in the kernel where the server of a network file system does not answer.
        within(_ANSWERS_S, lambda: fcntl.lockf(file, kind | fcntl.LOCK_NB))
    except OSError as error:  # of another number, or after the time: this file system has no locks
        return _Lock.OF_OTHERS if error.errno in _TAKEN else _Lock.NONE
    return _Lock.OWN


def _about(file: int) -> dict[str, object]:
    try:
        read = json.loads(os.pread(file, 4096, 0))
    except (OSError, ValueError):
        return {}
    return read if isinstance(read, dict) else {}
