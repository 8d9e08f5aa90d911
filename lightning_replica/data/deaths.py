"""When a rank is told that one of its DataLoader's workers has died.

[Note: deaths of workers]
torch raises from a handler of SIGCHLD, so in whatever line the rank is: in the middle of an update, of a recovery, or
of the loader's own bookkeeping. During a fit, a rank is told when it next asks a loader for a batch, or at once where
it waits for one.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from lightning_replica._compat.loading import raise_deaths_of_workers, replace_check_for_deaths
from lightning_replica.devices.exceptions import with_causes
from lightning_replica.errors import WorkerDiedError

_loading = False
_release: Callable[[], None] | None = None


def hold() -> None:
    """From here on, deaths of workers are told in `loading` only."""
    global _release
    if _release is None:
        _release = replace_check_for_deaths(_check)


def release() -> None:
    """Ends what `hold` has begun."""
    global _release
    if _release is not None:
        _release()
    _release = None


@contextmanager
def loading() -> Iterator[None]:
    """This rank asks a loader for something.

    Raises:
        WorkerDiedError: If a worker has died, or dies inside.
    """
    global _loading
    _loading = True
    try:
        _check()
        yield
    finally:
        _loading = False


def worker_died(error: BaseException) -> bool:
    """Whether an exception says that a worker of a DataLoader has died."""
    return any(isinstance(each, WorkerDiedError) for each in with_causes(error))


def _check() -> None:
    if _loading:
        try:
            raise_deaths_of_workers()
        except RuntimeError as error:
            raise WorkerDiedError(str(error)) from None
