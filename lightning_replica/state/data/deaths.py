"""Decides when a rank gets the error that one of its DataLoader's workers has died.

[Note: deaths of workers]
torch raises this error from a handler of SIGCHLD, at whatever line the rank has reached: in the middle of an update, of
a recovery, or of the loader's own bookkeeping. During a fit, the rank gets the error when it next asks a loader for a
batch, or at once if it waits for a batch.

A worker that dies while the rank receives what it has sent breaks a connection, too. Its end may be seen a bit later.
"""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from lightning_replica._compat.loading import raise_deaths_of_workers, replace_check_for_deaths
from lightning_replica.errors import WorkerDiedError

_SEEN_S, _PAUSE_S = 0.5, 0.01
_loading = False
_release: Callable[[], None] | None = None


def hold() -> None:
    """From now on, raise errors about dead workers in `loading` only."""
    global _release
    if _release is None:
        _release = replace_check_for_deaths(_check)


def release() -> None:
    """Undo what `hold` has done."""
    global _release
    if _release is not None:
        _release()
    _release = None


@contextmanager
def loading() -> Iterator[None]:
    """Allow errors about dead workers inside this context, in which the rank asks a loader for something.

    Raises:
        WorkerDiedError: If a worker has died, or dies inside.
    """
    global _loading
    _loading = True
    try:
        _check()
        yield
    except (OSError, EOFError):
        deadline = time.monotonic() + _SEEN_S
        while time.monotonic() < deadline:
            _check()
            time.sleep(_PAUSE_S)
        raise
    finally:
        _loading = False


def _check() -> None:
    if _loading:
        try:
            raise_deaths_of_workers()
        except RuntimeError as error:
            raise WorkerDiedError(str(error)) from None
