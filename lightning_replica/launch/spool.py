"""The supervisor's directory for large data that its ranks leave for each other.

The supervisor removes it when it ends. A supervisor that is killed leaves it behind, perhaps with gigabytes; the next
supervisor that starts with the same TMPDIR removes it. A lock shows which directories are still in use. Process ids
cannot show this, as they mean nothing to another container that shares the place.
"""

import fcntl
import os
import shutil
import tempfile
import time
from contextlib import suppress
from pathlib import Path

_PREFIX = "lightning_replica_spool-"  # no other name may begin like this: its directory would be removed while in use
_YOUNG_S = 60.0  # a directory of this age may be about to be locked


class Spool:
    """A new directory under TMPDIR, in use until `close` is called or its process ends.

    Attributes:
        path: Path of the directory.

    Raises:
        OSError: If the directory cannot be created.
    """

    def __init__(self) -> None:
        _sweep(Path(tempfile.gettempdir()))
        self.path = Path(tempfile.mkdtemp(prefix=_PREFIX))
        self._lock = _lock(self.path)

    def close(self) -> None:
        """Remove the directory with its contents."""
        shutil.rmtree(self.path, ignore_errors=True)
        if self._lock is not None:
            os.close(self._lock)
            self._lock = None


def _sweep(place: Path) -> None:
    for path in place.glob(f"{_PREFIX}*"):
        with suppress(OSError):  # it belongs to another user, or is gone already
            stat = path.stat()
            if stat.st_uid == os.getuid() and time.time() - stat.st_mtime > _YOUNG_S:
                _remove(path)


def _remove(path: Path) -> None:
    lock = _lock(path)
    if lock is not None:
        shutil.rmtree(path, ignore_errors=True)
        os.close(lock)


def _lock(path: Path) -> int | None:
    """Lock a directory. Return None if another process holds the lock, or if this file system has no locks."""
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        os.close(descriptor)
        return None
    return descriptor
