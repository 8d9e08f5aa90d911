"""Named points that every rank passes on its way through a step.

They serve two readers: whoever watches progress (a rank that stands at one point for long hangs there) and
whoever injects faults (a kill is aimed at a point). Nobody listens by default; a point then costs one look at
an empty tuple.
"""

from collections.abc import Callable
from typing import Literal, TypeAlias

Point: TypeAlias = Literal[
    "batch_start",  # before the batch is fetched
    "reduction",  # some of the gradient buckets are reduced, others are not
    "before_commit",  # all buckets are reduced, snapshots are taken, the commit has not begun
    "after_commit",  # the commit vector is known, the shard is untouched
    "update",  # the optimizer is changing the shard
    "gather",  # some of the parameter buckets are gathered, others are not
    "batch_end",  # the update is done, the batch's last hooks are not
    "stop",
    "clean",
    "regroup",
    "repair",
    "rollback",
    "resume",
    "save",  # this rank's part of a sharded checkpoint is on the disk, nothing is published
    "publish",  # the former checkpoint of that name is aside, the new one is not in its place
]

Listener: TypeAlias = Callable[[Point], None]
_listeners: tuple[Listener, ...] = ()


def reach(point: Point) -> None:
    """Tells every listener that this rank has come to ``point``."""
    for listener in _listeners:
        listener(point)


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
