"""Named points that every rank passes on its way through a step.

They serve two readers: whoever watches progress (a rank that stands at one point for long hangs there) and
whoever injects faults (a kill is aimed at a point). Nobody listens by default; a point then costs one look at
an empty tuple.

Whoever watches progress must know more than points: which long stretches of code without one are under way, such as
a validation, and whether the rank only waits for others.
"""

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Literal, Protocol, TypeAlias, get_args

PhaseName: TypeAlias = Literal["stop", "clean", "regroup", "repair", "rollback", "resume"]
"""The phases of a recovery, in order; what happens in each is told in recovery/phases.py."""
PHASES: tuple[PhaseName, ...] = get_args(PhaseName)

Point: TypeAlias = Literal[
    "batch_start",  # before the batch is fetched
    "reduction",  # some of the gradient buckets are reduced, others are not
    "before_commit",  # all buckets are reduced, snapshots are taken, the commit has not begun
    "after_commit",  # the commit vector is known, the shard is untouched
    "update",  # the optimizer is changing the shard
    "gather",  # some of the parameter buckets are gathered, others are not
    "batch_end",  # the update is done, the batch's last hooks are not
    PhaseName,
    "save",  # this rank's part of a sharded checkpoint is on the disk, nothing is published
    "gasp",  # the run was given up; those who are left come together
    "gasp_write",  # they have agreed on the step, and begin to write
    "track",  # the last checkpoint is published, the tracker does not name it yet
    "publish",  # the former checkpoint of that name is aside, the new one is not in its place
]

Stretch: TypeAlias = Literal[
    "epoch_start",  # up to the first batch: hooks, the start of data workers
    "forward",  # the training step
    "backward",  # up to the reduction, with the hooks in between
    "validation_start",  # up to the first batch of a validation
    "validation",  # a validation step
    "validation_batch_end",  # between two of them
    "validation_end",  # after the last of them
    "checkpoint",  # writing one
    "epoch_end",  # the hooks of an epoch's end
    "fit_end",  # the hooks of the end of `fit`
]


class Watcher(Protocol):
    """Whoever watches the progress of this rank."""

    def begins(self, place: Point | Stretch) -> None:
        """This rank has passed a point, or a stretch begins."""

    def at_step(self, step: int) -> None:
        """A batch begins, with ``step`` updates applied."""

    def waits(self) -> None:
        """This rank waits for others, and is alive: called every few milliseconds while it does."""

    def goes_on(self) -> None:
        """It has waited, and goes on where it was."""


Listener: TypeAlias = Callable[[Point], None]
_listeners: tuple[Listener, ...] = ()
_watcher: Watcher | None = None
_thread = threading.local()


def reach(point: Point) -> None:
    """Tells the watcher and every listener that this rank has come to ``point``."""
    if _watcher is not None and not hasattr(_thread, "beside"):
        _watcher.begins(point)
    for listener in _listeners:
        listener(point)


def begin(stretch: Stretch) -> None:
    """Tells the watcher that a stretch begins; it lasts until the next stretch or point."""
    if _watcher is not None:
        _watcher.begins(stretch)


def at_step(step: int) -> None:
    """Tell the watcher that a batch begins, with ``step`` updates applied."""
    if _watcher is not None:
        _watcher.at_step(step)


def waits() -> None:
    """Tells the watcher that this rank waits for others; to be called again and again while it does."""
    if _watcher is not None:
        _watcher.waits()


def goes_on() -> None:
    """Tells the watcher that the wait is over."""
    if _watcher is not None:
        _watcher.goes_on()


@contextmanager
def beside_training() -> Iterator[None]:
    """What this thread does is no part of the rank's way through a step: its points are not told to the watcher."""
    _thread.beside = True
    try:
        yield
    finally:
        del _thread.beside


def watch(watcher: Watcher | None) -> None:
    """Makes ``watcher`` the one that watches this rank; None ends it."""
    global _watcher
    _watcher = watcher


def listen(listener: Listener) -> Callable[[], None]:
    """Calls ``listener(point)`` at every point from now on.

    Returns:
        A function that stops it.
    """
    global _listeners
    _listeners = (*_listeners, listener)

    def stop() -> None:
        global _listeners
        _listeners = tuple(kept for kept in _listeners if kept is not listener)

    return stop
