"""When a rank is told that one of its DataLoader's workers has died.

[Note: deaths of workers]
torch raises from a handler of SIGCHLD, so in whatever line the rank is: in the middle of an update, of a recovery, or
of the loader's own bookkeeping. While a rank trains, it is told when it next asks a loader for a batch, or at once
where it waits for one.
"""

from collections.abc import Iterator
from contextlib import contextmanager

from lightning_replica._compat.loading import raise_deaths_of_workers, raise_deaths_of_workers_only

_loading = False


@contextmanager
def told_while_loading() -> Iterator[None]:
    """Inside, deaths of workers are told in `loading` only."""
    undo = raise_deaths_of_workers_only(lambda: _loading)
    try:
        yield
    finally:
        undo()


@contextmanager
def loading() -> Iterator[None]:
    """This rank asks a loader for something.

    Raises:
        RuntimeError: If a worker has died, or dies inside.
    """
    global _loading
    _loading = True
    try:
        raise_deaths_of_workers()
        yield
    finally:
        _loading = False
