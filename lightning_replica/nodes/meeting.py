"""Who is in: the nodes that have come wait until enough of them live, and the first of these gives them their ranks.

Each node sends heartbeats while it waits, and looks for nodes with lower numbers. The one that finds none alive
places the ranks: it reads the heartbeats of all. So a node that dies while it waits holds up nobody, and a node's
messages do not grow with the number of nodes.

A node that comes later, or is not needed, is a spare. Which node has which ranks from then on is a `Placement`.

[Note: in slices]
A wait in the store is a call into C++, in which Python hears no signal. So all waits here are short.
"""

import re
import time
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass
from datetime import timedelta
from typing import Final

import torch.distributed as dist

from lightning_replica.control import keys
from lightning_replica.control.untrusted import read
from lightning_replica.core.messages import say
from lightning_replica.errors import ConfigurationError
from lightning_replica.nodes.listener import is_dead
from lightning_replica.nodes.liveness import Heartbeat
from lightning_replica.nodes.membership import Member, come, first_placement
from lightning_replica.nodes.node_settings import NodeSettings
from lightning_replica.nodes.placement import Placement
from lightning_replica.stores.tagged import peek

_SLICE_S: Final = 1.0
_FIRST_WORD_S: Final = 5.0
_WORD_S: Final = 60.0


def join(store: dist.Store, member: Member, settings: NodeSettings) -> Placement:
    """Wait until enough nodes have come, and return the first placement.

    Args:
        store: The store of the run.
        member: This node.
        settings: The nodes' settings.

    Raises:
        ConfigurationError: If too few nodes have come within ``join_timeout_s``.
    """
    meeting = _Meeting(store, member, settings)
    while not store.check([keys.NODES_FIRST]):
        if not meeting.look():
            meeting.wait()
    store.set(keys.beat(member.number), Heartbeat().to_json())  # from here on, `heartbeats` sends them
    return first_placement(store)


class _Meeting:
    """The nodes that wait, as one of them sees them.

    Args:
        store: The store of the run.
        own: This node.
        settings: The nodes' settings.
    """

    def __init__(self, store: dist.Store, own: Member, settings: NodeSettings) -> None:
        self._store, self._own, self._settings = store, own, settings
        self._look_s = min(settings.beat_s, _SLICE_S)
        self._members: dict[int, Member] = {own.number: own}
        self._seen: dict[int, _Seen] = {}
        self._dead: set[int] = set()
        self._looks, self._awake_s = 0, 0.0
        self._began = self._looked = time.monotonic()
        self._next_word = self._began + _FIRST_WORD_S
        self._is_first = False

    def look(self) -> bool:
        """Send a heartbeat. If no node with a lower number lives, and enough nodes do, place the ranks.

        Returns:
            Whether the ranks are placed.

        Raises:
            ConfigurationError: If the time is over.
        """
        now = time.monotonic()
        self._awake_s += min(now - self._looked, 2 * self._look_s)  # who was stopped itself accuses nobody
        self._looked, self._looks = now, self._looks + 1
        self._store.set(keys.beat(self._own.number), Heartbeat(-self._looks).to_json())
        left_s = self._began + self._settings.join_timeout_s - now
        self._is_first = not any(self._living([number]) for number in range(self._own.number))
        if not self._is_first and now < self._next_word and left_s > 0:
            return False
        living = self._living(range(come(self._store)))
        if self._is_first and len(living) >= self._settings.nnodes:
            chosen = sorted(living[: self._settings.nnodes], key=self._by_name)
            placement = Placement(tuple(chosen))
            self._store.compare_set(keys.NODES_FIRST, "", placement.to_json())
            return True
        if left_s <= 0:
            raise ConfigurationError(
                f"Only {len(living)} of nnodes={self._settings.nnodes} nodes have come to"
                f" {self._settings.store.endpoint} within {self._settings.join_timeout_s:g} s. Start the same command"
                " on the other nodes, or raise the time-out of the rendezvous (--rdzv-conf join_timeout=...)."
            )
        if now >= self._next_word:
            self._next_word = now + _WORD_S
            self._tell(living, left_s)
        return False

    def wait(self) -> None:
        """Wait for the placement, for a short time only; the node that makes it waits for the next node."""
        sought = keys.node(max(self._members) + 1) if self._is_first else keys.NODES_FIRST
        with suppress(dist.DistStoreError):
            self._store.wait([sought], timedelta(seconds=self._look_s))

    def _living(self, numbers: Iterable[int]) -> list[int]:
        """Return those of some nodes that live, in order, as far as is known."""
        numbers = [number for number in numbers if number not in self._dead]
        self._meet([number for number in numbers if number not in self._members])
        known = [number for number in numbers if number in self._members and number != self._own.number]
        values = peek(self._store, [keys.beat(number) for number in known])
        received = dict(zip(known, values, strict=True))
        return [n for n in numbers if n == self._own.number or (n in received and self._lives(n, received[n]))]

    def _meet(self, numbers: list[int]) -> None:
        """Read who some nodes are, if they have come."""
        found = [n for n in numbers if self._store.check([keys.node(n), keys.beat(n)])]
        for number, line in zip(found, peek(self._store, [keys.node(n) for n in found]), strict=True):
            member = read(keys.node(number), line, Member.from_json, None) if line else None
            if member is not None:
                self._members[number] = member

    def _lives(self, number: int, value: bytes) -> bool:
        before = self._seen.get(number)
        heartbeat = read(keys.beat(number), value, Heartbeat.from_json, None) if value else None
        if before is None or heartbeat != before.heartbeat:
            self._seen[number] = _Seen(heartbeat, self._awake_s)
        if before is not None and heartbeat != before.heartbeat:
            return True
        if is_dead(self._members[number]):
            self._dead.add(number)
            return False
        return self._awake_s - self._seen[number].at_s < self._settings.node_timeout_s

    def _by_name(self, number: int) -> tuple[list[tuple[int, str]], int]:
        """Return what nodes are ordered by: whoever starts the same nodes again finds the same ranks on each.

        Parts that are numbers count as such: node2 comes before node10.
        """
        parts = re.split(r"(\d+)", self._members[number].name)
        return [(int(part), "") if part.isdecimal() else (-1, part) for part in parts], number

    def _tell(self, living: list[int], left_s: float) -> None:
        names = ", ".join(self._members[number].name for number in living)
        died = f" {len(self._dead)} more have died while they waited." if self._dead else ""
        say(
            f"waiting for {self._settings.nnodes - len(living)} more of nnodes={self._settings.nnodes} nodes at"
            f" {self._settings.store.endpoint}, for up to {left_s:.0f} s. Here: {names}.{died}"
        )


@dataclass(frozen=True)
class _Seen:
    """The newest heartbeat of a node, and when it came, in seconds that this process has been awake."""

    heartbeat: Heartbeat | None
    at_s: float
