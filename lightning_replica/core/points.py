"""Named points that every rank passes in a step.

Two kinds of code use them. The watcher observes progress: a rank that stays at one point for long hangs there.
Listeners inject faults: a kill is aimed at a point. By default there are none of either, and a point costs one look at
an empty tuple.

The watcher needs more than points: it must also learn when a long stretch of code without points begins, such as a
validation, and whether the rank only waits for others.
"""

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Literal, Protocol, TypeAlias, get_args

PhaseName: TypeAlias = Literal["stop", "clean", "regroup", "repair", "rollback", "resume"]
"""The phases of a recovery, in order; recovery/phases.py describes what happens in each."""
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
    "gasp",  # the run was given up; the survivors meet
    "gasp_write",  # the survivors have agreed on the step, and begin to write
    "track",  # the last checkpoint is published, the tracker does not name it yet
    "publish",  # the former checkpoint of that name is moved aside, the new one is not in its place yet
]

Stretch: TypeAlias = Literal[
    "epoch_start",  # up to the first batch: hooks, the start of data workers
    "forward",  # the training step
    "backward",  # up to the reduction, with the hooks in between
    "validation_start",  # up to the first batch of a validation
    "validation",  # a validation step
    "validation_batch_end",  # between two validation steps
    "validation_end",  # after the last validation step
    "checkpoint",  # writing a checkpoint
    "epoch_end",  # the hooks of an epoch's end
    "fit_end",  # the hooks of the end of `fit`
]


class Watcher(Protocol):
    """An object that watches the progress of this rank."""

    def begins(self, place: Point | Stretch) -> None:
        """Note that this rank has reached a point, or that a stretch begins."""

    def at_step(self, step: int) -> None:
        """Note that a batch begins, with ``step`` updates applied."""

    def waits(self) -> None:
        """Note that this rank waits for others and is alive. Called every few milliseconds while it waits."""

    def device_waits(self, waits: bool) -> None:
        """Note whether the device is in a collective that has not ended for a while; called by another thread."""

    def goes_on(self) -> None:
        """Note that the wait is over, and that this rank continues at the same place."""


Listener: TypeAlias = Callable[[Point], None]
_listeners: tuple[Listener, ...] = ()
_watcher: Watcher | None = None
_thread = threading.local()


def reach(point: Point) -> None:
    """Tell the watcher and every listener that this rank has reached ``point``."""
    if _watcher is not None and not hasattr(_thread, "hidden"):
        _watcher.begins(point)
    for listener in _listeners:
        listener(point)


def begin(stretch: Stretch) -> None:
    """Tell the watcher that a stretch begins; it lasts until the next stretch or point."""
    if _watcher is not None:
        _watcher.begins(stretch)


def at_step(step: int) -> None:
    """Tell the watcher that a batch begins, with ``step`` updates applied."""
    if _watcher is not None:
        _watcher.at_step(step)


def waits() -> None:
    """Tell the watcher that this rank waits for others; call this repeatedly during the wait."""
    if _watcher is not None:
        _watcher.waits()


def device_waits(waits: bool) -> None:
    """Tell the watcher whether the device is in a collective that has not ended for a while."""
    if _watcher is not None:
        _watcher.device_waits(waits)


def goes_on() -> None:
    """Tell the watcher that the wait is over."""
    if _watcher is not None:
        _watcher.goes_on()


@contextmanager
def off_training_path() -> Iterator[None]:
    """Hide the points of this thread from the watcher inside the block: the thread works beside the rank's steps."""
    _thread.hidden = True
    try:
        yield
    finally:
        del _thread.hidden


def watch(watcher: Watcher | None) -> None:
    """Let ``watcher`` watch this rank from now on; None removes the watcher."""
    global _watcher
    _watcher = watcher


def listen(listener: Listener) -> Callable[[], None]:
    """Call ``listener(point)`` at every point from now on.

    Returns:
        A function that removes the listener.
    """
    global _listeners
    _listeners = (*_listeners, listener)

    def stop() -> None:
        global _listeners
        _listeners = tuple(kept for kept in _listeners if kept is not listener)

    return stop
