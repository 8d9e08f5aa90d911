"""What nodes do when the store of the run is lost: they agree on another, to write the last checkpoint.

A store is lost when its machine refuses connections. The live node with ranks and the lowest number serves the next one
at its own port. It waits until every other node that is not certainly dead has come. So no node is left that might
still have the first store and go on training: a node that has it does not come, and then nobody writes anything.
"""

import json
import threading
import time
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from datetime import timedelta
from typing import Final

import torch.distributed as dist

from lightning_replica.control import keys
from lightning_replica.control.faults import Fault
from lightning_replica.control.generation import Generations
from lightning_replica.nodes.listener import Listener, is_dead
from lightning_replica.nodes.liveness import Heartbeat
from lightning_replica.nodes.membership import Member
from lightning_replica.stores.address import Address, StoreAddress
from lightning_replica.stores.reach import reach
from lightning_replica.stores.shared import SharedStore

_PAUSE_S: Final = 0.1
# Ranks may have begun generations that no supervisor had read in the first store before it was lost.
_UNREAD: Final = 8
_LOST: Final = Fault("peer gone", (), "the store of the run was lost")


class Stores:
    """The stores of a run, each in the place of the one before. Any thread may call this.

    Args:
        first: The address of the first.
    """

    def __init__(self, first: Address) -> None:
        self._addresses: list[Address] = [first]
        self._changed = threading.Condition()

    @property
    def count(self) -> int:
        """Number of stores until now."""
        return len(self._addresses)

    @property
    def newest(self) -> Address:
        """The address of the store that is used now."""
        return self._addresses[-1]

    def add(self, address: Address) -> None:
        """Use another store from now on."""
        with self._changed:
            self._addresses.append(address)
            self._changed.notify_all()

    def connect(self) -> dist.Store:
        """Open a connection that moves to the next store when the one before is lost."""
        return SharedStore(self._addresses[0], self._wait)

    def reach(self) -> dist.Store:
        """Open a connection to the newest store. See `stores.tcp.reach`."""
        return reach(self.newest)

    def _wait(self, number: int) -> Address:
        with self._changed:
            self._changed.wait_for(lambda: len(self._addresses) > number)
            return self._addresses[number]


class NoFailoverError(Exception):
    """Nodes have not agreed on another store in time: one that is not certainly dead did not come."""


@dataclass(frozen=True)
class FailoverStore:
    """The store that takes the place of a lost one.

    Attributes:
        address: Its address.
        served: The store itself, if this node serves it.
        dead: The nodes that have certainly died.
    """

    address: Address
    served: dist.TCPStore | None = None
    dead: frozenset[int] = frozenset()


def agree_on_failover(
    own: Member,
    others: Collection[Member],
    trains: Collection[int],
    listener: Listener,
    known: int,
    phase: str,
    timeout_s: float,
) -> FailoverStore:
    """Agree with the other nodes on a store.

    Args:
        own: This node.
        others: The other nodes that were not lost when the store was.
        trains: The numbers of the nodes that had ranks. Those serve before spares: they know which nodes were lost.
        listener: The port of this node.
        known: The newest generation that this node knows.
        phase: Where the run is; see `control.phase`.
        timeout_s: How long to try.

    Raises:
        NoFailoverError: If they do not agree in time.
    """
    deadline, dead = time.monotonic() + timeout_s, set[int]()
    for member in sorted((own, *others), key=lambda each: (each.number not in trains, each.number)):
        if member is own:
            waited_for = {each.number: each for each in others if each.number not in dead}
            return _serve(own, waited_for, dead, listener, known, phase, deadline)
        found = _join(member, own, known, deadline)
        if found is not None:
            return found
        dead.add(member.number)
    raise NoFailoverError


def _join(host: Member, own: Member, known: int, deadline: float) -> FailoverStore | None:
    """Enter the store that ``host`` serves, as soon as it does; return None if it dies."""
    address = StoreAddress(host.address, host.port)

    def agree() -> FailoverStore:
        store = reach(address)
        if not store.check([keys.agrees(own.number)]):
            store.add(keys.NODES_AGREE, 1)
        store.set(keys.agrees(own.number), str(known))
        store.wait([keys.AGREED], timedelta(seconds=max(0.1, deadline - time.monotonic())))
        return FailoverStore(address, None, frozenset(json.loads(store.get(keys.AGREED))))

    return _until(deadline, agree)


def _until(deadline: float, attempt: Callable[[], FailoverStore]) -> FailoverStore | None:
    while time.monotonic() < deadline:
        try:
            return attempt()
        except ConnectionRefusedError:
            return None
        except (OSError, dist.DistError):  # the host has not noticed yet that the first store is lost
            time.sleep(_PAUSE_S)
    raise NoFailoverError


def _serve(
    own: Member,
    others: Mapping[int, Member],
    dead: set[int],
    listener: Listener,
    known: int,
    phase: str,
    deadline: float,
) -> FailoverStore:
    """Serve the store, and wait for all others that have not died."""
    served, address = listener.serve(), StoreAddress(own.address, own.port)
    store = reach(address)
    newest, coming = known, dict(others)
    while coming:
        for number, member in tuple(coming.items()):
            if store.check([keys.agrees(number)]):
                newest = max(newest, int(store.get(keys.agrees(number))))
                del coming[number]
            elif is_dead(member):
                dead.add(number)
                del coming[number]
        if time.monotonic() > deadline:
            raise NoFailoverError
        time.sleep(_PAUSE_S)
    _prepare(store, (own.number, *others), dead, newest, phase)
    return FailoverStore(address, served, frozenset(dead))


def _prepare(store: dist.Store, nodes: Collection[int], dead: Collection[int], newest: int, phase: str) -> None:
    """Write what processes expect to find: the phase, the log, and a heartbeat of every node."""
    store.set(keys.PHASE, phase)
    for generation in range(1, newest + _UNREAD + 1):
        Generations(store).begin(generation, _LOST)
    for number in nodes:
        store.set(keys.beat(number), Heartbeat().to_json())
    store.add(keys.NODES_COME, 0)
    store.set(keys.AGREED, json.dumps(sorted(dead)))
