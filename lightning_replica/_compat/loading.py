"""Private names of torch's DataLoader."""

from collections.abc import Callable
from typing import Any

import psutil
import torch
from torch.utils.data import DataLoader

from lightning_replica._compat.versions import need, need_parameters, private_names_of

with private_names_of("torch"):
    from torch.utils.data._utils import signal_handling
    from torch.utils.data.dataloader import _DatasetKind, _MultiProcessingDataLoaderIter

    need(signal_handling, "_error_if_any_worker_fails", "_remove_worker_pids")
    need(torch._C, "_error_if_any_worker_fails")
    need(_MultiProcessingDataLoaderIter, "_shutdown_workers")
    need_parameters(_DatasetKind.create_fetcher, "kind", "dataset", "auto_collation", "collate_fn", "drop_last")

_END_S = 5.0


def take_part_in_fetching(mark: Any, collate: Any, wrap: Callable[[Any], Any]) -> None:
    """Make this worker fetch through the wrappers that ``wrap`` returns for torch's fetchers. Called in a worker.

    Args:
        mark: The loader's ``collate_fn``. Loaders of this process with another ``collate_fn`` are left alone.
        collate: The real ``collate_fn``, which ``mark`` replaces.
        wrap: Called with a fetcher at the start of each iteration; returns the wrapper.
    """
    create: Callable[..., Any] = _DatasetKind.create_fetcher

    def create_fetcher(kind: Any, dataset: Any, auto_collation: Any, collate_fn: Any, *more: Any, **named: Any) -> Any:
        if collate_fn is not mark:
            return create(kind, dataset, auto_collation, collate_fn, *more, **named)
        return wrap(create(kind, dataset, auto_collation, collate, *more, **named))

    _DatasetKind.create_fetcher = staticmethod(create_fetcher)  # type: ignore[method-assign]


def raise_deaths_of_workers() -> None:
    """Raise an error if a worker of any loader of this process has died, and that was not reported yet.

    Raises:
        RuntimeError: If a worker has died.
    """
    torch._C._error_if_any_worker_fails()


def replace_check_for_deaths(check: Callable[[], None]) -> Callable[[], None]:
    """Make torch's handler of SIGCHLD call ``check`` in place of `raise_deaths_of_workers`.

    Returns:
        A function that restores torch's own check.
    """
    original = signal_handling._error_if_any_worker_fails

    def undo() -> None:
        signal_handling._error_if_any_worker_fails = original

    signal_handling._error_if_any_worker_fails = check
    return undo


def end_workers(iterator: Any) -> None:
    """Shut down the workers of a DataLoader's iterator, if it has any, and wait until they have ended.

    torch asks the workers to end, and waits 5 seconds for each. If one was killed or stopped, this function kills all
    of them: that worker may hold a lock that the others wait for.
    """
    if not isinstance(iterator, _MultiProcessingDataLoaderIter) or iterator._shutdown:
        return
    if all(_is_well(worker) for worker in iterator._workers):
        iterator._shutdown_workers()
    else:
        _abandon(iterator)
    for worker in iterator._workers:
        if worker.is_alive():
            worker.kill()
            worker.join(_END_S)


def _abandon(iterator: Any) -> None:
    iterator._shutdown = True
    signal_handling._remove_worker_pids(id(iterator))
    iterator._worker_pids_set = False
    for worker in iterator._workers:
        worker.kill()
    for queue in iterator._index_queues:
        queue.cancel_join_thread()
        queue.close()
    if iterator._pin_memory:
        iterator._pin_memory_thread_done_event.set()  # the thread may be reading what a killed worker has sent in part


def _is_well(worker: Any) -> bool:
    if not worker.is_alive():
        return bool(worker.exitcode == 0)
    try:
        status = psutil.Process(worker.pid).status()
    except psutil.Error:  # it has just ended
        return True
    return status not in (psutil.STATUS_STOPPED, psutil.STATUS_TRACING_STOP)


def forget_workers(loader: DataLoader[Any]) -> None:
    """Make a loader with persistent workers start new workers."""
    loader._iterator = None
