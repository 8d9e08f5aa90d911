"""Collectives under way: waited for in slices, or put in order, and remembered until they have ended.

[Note: destructors may block]
gloo sometimes loses the wake-up of an operation whose connection is closed while it runs: seen with large messages in
most faults, torch 2.13. Whoever waits in slices does not care. But the destructor of the process group joins the thread
that runs the operation, and would wait out the group's time-out. So the package knows which operations have not ended,
and a group that has such a one is never destroyed (recovery/groups.py).

[Note: collectives in a device's queue]
What a host hands to a device runs later, in order. So the host need not wait for a collective on a device's tensors:
``Work.wait()`` without a time-out only puts what comes next behind it. (With one it does wait, and when that expires,
NCCL and HCCL abort the group: no slices there.) Whether all went well is asked for once a step, by `finish`: before a
rank says that its gradient is complete. An aborted collective ends without an error and leaves anything in its
tensors; so in the end it is the check that decides.
"""

import time
from collections.abc import Callable
from datetime import timedelta
from typing import TypeAlias

import torch.distributed as dist

from lightning_replica import points
from lightning_replica._compat.torch import failure_of
from lightning_replica.errors import CollectiveError

Work: TypeAlias = "dist.Work | Ordered | None"
Check: TypeAlias = Callable[[], None]
SLICE = timedelta(milliseconds=20)
_MANY = 256
_POLL_S = 0.0005

_under_way: "list[dist.Work]" = []
_ordered: "list[dist.Work]" = []


class Ordered:
    """A collective on tensors of a device. See [Note: collectives in a device's queue].

    Args:
        work: What an ``async_op=True`` collective returned.
    """

    def __init__(self, work: "dist.Work") -> None:
        self._work = work
        _ordered.append(work)

    def come_before(self) -> None:
        """Puts whatever the host hands to the device from now on behind the collective.

        Raises:
            CollectiveError: If it is known to have failed.
        """
        try:
            self._work.wait()
        except RuntimeError as error:
            raise CollectiveError(str(error).splitlines()[0]) from error


def track(work: "dist.Work | None") -> Work:
    """Remembers a collective that is waited for later, or perhaps never."""
    if work is not None:
        if len(_under_way) >= _MANY:
            _under_way[:] = [other for other in _under_way if not other.is_completed()]
        _under_way.append(work)
    return work


def wait(work: Work, check: Check) -> None:
    """Waits for ``work`` in slices of 20 ms, calling ``check`` between them; what is ordered is only put in order.

    Args:
        work: What an ``async_op=True`` collective returned; None where this rank is not concerned.
        check: Raises when the wait has become pointless (the world moves on without it).

    Raises:
        CollectiveError: If the collective failed.
    """
    if isinstance(work, Ordered):
        work.come_before()
        return
    waited = False
    try:
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
                raise
    finally:
        if waited:
            points.goes_on()


def finish(check: Check) -> None:
    """Waits until every collective that was ordered has ended: then tensors hold what they are said to hold.

    Args:
        check: Raises when the wait has become pointless.

    Raises:
        CollectiveError: If one of them failed.
    """
    if not _ordered:
        return
    while _ordered:
        _await_end(_ordered[0], check)
        error = failure_of(_ordered.pop(0))
        if error is not None:
            raise CollectiveError(str(error).splitlines()[0]) from error
    check()  # one that was aborted is no different from one that ended


def _await_end(work: "dist.Work", check: Check) -> None:
    """Looks often whether ``work`` has ended, and once a slice whether it still matters."""
    waited, look = False, time.monotonic() + SLICE.total_seconds()
    try:
        while not work.is_completed():
            if time.monotonic() > look:
                waited = True
                points.waits()
                check()
                look = time.monotonic() + SLICE.total_seconds()
            time.sleep(_POLL_S)
    finally:
        if waited:
            points.goes_on()


def all_ended(patience_s: float) -> bool:
    """Whether every collective ends within ``patience_s``; forgets those that do not."""
    _under_way.extend(_ordered)
    _ordered.clear()
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
