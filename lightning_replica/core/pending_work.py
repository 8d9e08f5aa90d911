"""Collectives under way: waiting for them in slices, ordering them on a device, and tracking them until they end.

[Note: destructors may block]
Gloo sometimes loses the wake-up of an operation whose connection is closed while it runs: seen with large messages in
most faults, torch 2.13. A wait in slices is not affected. But the destructor of the process group joins the thread that
runs the operation, and would block until the group's time-out. So the package tracks which operations have not ended,
and a group with such an operation is never destroyed (groups/world.py).

[Note: collectives in a device's queue]
Work that a host hands to a device runs later, in order. So the host need not wait for a collective on a device's
tensors: ``Work.wait()`` without a time-out only queues later work behind the collective. (With a time-out it does wait,
and when that expires, NCCL and HCCL abort the group. So slices cannot be used there.) Once a step, `finish` checks that
all collectives succeeded, before a rank reports that its gradient is complete. An aborted collective ends without an
error and leaves undefined values in its tensors. So the final decision lies with the function ``check``.
"""

import time
from collections.abc import Callable
from datetime import timedelta
from typing import TypeAlias

import torch.distributed as dist

from lightning_replica._compat.torch import failure_of
from lightning_replica.core import points
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
        """Queue all work that the host hands to the device from now on behind the collective.

        Raises:
            CollectiveError: If the collective is known to have failed.
        """
        try:
            self._work.wait()
        except RuntimeError as error:
            raise CollectiveError(str(error).splitlines()[0]) from error

    def await_end(self, check: Check) -> None:
        """Wait on the host until the collective has ended, and call ``check`` once per slice.

        What is queued behind a collective that never ends fills the queue of the device, and then blocks the host in
        the next kernel's launch, where nothing shows that the rank only waits for others.
        """
        _await_end(self._work, check)


def track(work: "dist.Work | None") -> Work:
    """Track a collective that the caller waits for later, or perhaps never; return it."""
    if work is not None:
        if len(_under_way) >= _MANY:
            _under_way[:] = [other for other in _under_way if not other.is_completed()]
        _under_way.append(work)
    return work


def wait(work: Work, check: Check) -> None:
    """Wait for ``work`` in slices of 20 ms, and call ``check`` between them.

    For an `Ordered` collective, do not wait: only queue later work behind it.

    Args:
        work: What an ``async_op=True`` collective returned; None if this rank takes no part in it.
        check: Raises when the wait has become pointless, because a newer generation has begun.

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
                # An expired slice and a failed collective raise the same error; only the latter is completed.
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
    """Wait until every `Ordered` collective has ended, so that its tensors hold its results.

    Args:
        check: Raises when the wait has become pointless.

    Raises:
        CollectiveError: If one of the collectives failed.
    """
    if not _ordered:
        return
    while _ordered:
        _await_end(_ordered[0], check)
        error = failure_of(_ordered.pop(0))
        if error is not None:
            raise CollectiveError(str(error).splitlines()[0]) from error
    check()  # an aborted collective looks like one that ended


class StallDetector:
    """Finds out whether the device stays in one collective; asked at intervals, by another thread than waits for it.

    A host that hands work to a device is blocked when the queue is full. If the device is in a collective, which waits
    for another rank, the host's stack does not show that.
    """

    def __init__(self) -> None:
        self._first: dist.Work | None = None

    def is_stalled(self) -> bool:
        """Return whether the collective that was under way at the last call has not ended yet."""
        before, self._first = self._first, next(iter(_ordered), None)
        return before is not None and before is self._first and not before.is_completed()


def _await_end(work: "dist.Work", check: Check) -> None:
    """Poll until ``work`` has ended, and call ``check`` once per slice."""
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
    """Return whether every tracked collective ends within ``patience_s``; then stop tracking all of them."""
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
    """Raise if the completed collective failed; do not if it only completed just after its slice expired."""
    try:
        work.wait()
    except RuntimeError as failure:
        raise CollectiveError(str(failure).splitlines()[0]) from error
