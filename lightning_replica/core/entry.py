"""What a process does as soon as it becomes a rank."""

import os
from collections.abc import Callable
from typing import Protocol

import torch.distributed as dist


class RankProcess(Protocol):
    """A process that a supervisor has started as a rank.

    Attributes:
        rank: Its rank.
        replaces: Whether it was started to replace a process that was lost.
    """

    rank: int
    replaces: bool

    def connect(self) -> dist.Store:
        """Open a new connection to the supervisor's store."""


_entered: dict[int, RankProcess] = {}  # by process, as a fork inherits its parent's memory
_calls: list[Callable[[RankProcess], None]] = []


def at_entry(call: Callable[[RankProcess], None]) -> None:
    """Register ``call``, which a process that becomes a rank calls as soon as it does; at once if it is one already."""
    _calls.append(call)
    now = entered()
    if now is not None:
        call(now)


def entered() -> RankProcess | None:
    """Return what this process has entered as; None if it is no rank."""
    return _entered.get(os.getpid())


def enter(process: RankProcess) -> None:
    """Note that this process is a rank now, and call what is registered."""
    _entered[os.getpid()] = process
    for call in _calls:
        call(process)
