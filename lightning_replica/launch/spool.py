"""The supervisor's directory, for what its ranks leave to each other and is large.

It goes when the supervisor ends. A supervisor that is killed leaves it behind, perhaps with gigabytes: the next one
that starts here removes it. A lock tells which are still in use, as process ids mean nothing to another container that
shares the place.
"""

import fcntl
import os
import shutil
import tempfile
import time
from contextlib import suppress
from pathlib import Path

_PREFIX = "lightning_replica_spool-"  # nothing else may begin like this: it would be removed while it is in use
_YOUNG_S = 60.0  # a directory of this age may be about to be locked


class Spool:
    """A new directory under TMPDIR, in use until it is closed or its process ends.

    Attributes:
        path: Where it is.

    Raises:
        OSError: If it cannot be made.
    """

    def __init__(self) -> None:
        _sweep(Path(tempfile.gettempdir()))
        self.path = Path(tempfile.mkdtemp(prefix=_PREFIX))
        self._lock = _lock(self.path)

    def close(self) -> None:
        """Remove it, with all that is in it."""
        shutil.rmtree(self.path, ignore_errors=True)
        if self._lock is not None:
            os.close(self._lock)
            self._lock = None


def _sweep(place: Path) -> None:
    for path in place.glob(f"{_PREFIX}*"):
        with suppress(OSError):  # somebody else's, or gone already
            stat = path.stat()
            if stat.st_uid == os.getuid() and time.time() - stat.st_mtime > _YOUNG_S:
                _remove(path)


def _remove(path: Path) -> None:
    lock = _lock(path)
    if lock is not None:
        shutil.rmtree(path, ignore_errors=True)
        os.close(lock)


def _lock(path: Path) -> int | None:
    """Locks a directory; None if somebody else has, or if this file system has no locks."""
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        os.close(descriptor)
        return None
    return descriptor
