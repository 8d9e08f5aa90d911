"""Collectives under way: waited for in slices, and remembered until they have ended.

[Note: destructors may block]
gloo sometimes loses the wake-up of an operation whose connection is closed while it runs: seen with large messages in
most faults, torch 2.13. Whoever waits in slices does not care. But the destructor of the process group joins the thread
that runs the operation, and would wait out the group's time-out. So the package knows which operations have not ended,
and a group that has such a one is never destroyed (recovery/groups.py).
"""

import time
from collections.abc import Callable
from datetime import timedelta
from typing import TypeAlias

import torch.distributed as dist

from lightning_replica import points
from lightning_replica.errors import CollectiveError

Work: TypeAlias = "dist.Work | None"
Check: TypeAlias = Callable[[], None]
SLICE = timedelta(milliseconds=20)
_MANY = 256

_under_way: "list[dist.Work]" = []


def track(work: Work) -> Work:
    """Remembers a collective that is waited for later, or perhaps never."""
    if work is not None:
        if len(_under_way) >= _MANY:
            _under_way[:] = [other for other in _under_way if not other.is_completed()]
        _under_way.append(work)
    return work


def wait(work: Work, check: Check) -> None:
    """Waits for ``work`` in slices of 20 ms, calling ``check`` between them.

    Args:
        work: What an ``async_op=True`` collective returned; None where this rank is not concerned.
        check: Raises when the wait has become pointless (the world moves on without it).

    Raises:
        CollectiveError: If the collective failed.
    """
    waited = False
    while work is not None:
        try:
            work.wait(SLICE)
            break
        except RuntimeError as error:
            # An expired slice and a failed collective raise alike; only the latter is completed.
            if work.is_completed():
                _finish(work, error)
                break
        waited = True
        points.waits()
        try:
            check()
        except BaseException:
            track(work)
            points.goes_on()
            raise
    if waited:
        points.goes_on()


def all_ended(patience_s: float) -> bool:
    """Whether every collective ends within ``patience_s``; forgets those that do not."""
    deadline = time.monotonic() + patience_s
    while any(not work.is_completed() for work in _under_way):
        if time.monotonic() > deadline:
            _under_way.clear()
            return False
        time.sleep(0.001)
    _under_way.clear()
    return True


def _finish(work: "dist.Work", error: RuntimeError) -> None:
    """Tells a collective that completed just after its slice expired from one that failed."""
    try:
        work.wait()
    except RuntimeError as failure:
        raise CollectiveError(str(failure).splitlines()[0]) from error
