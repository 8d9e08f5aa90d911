"""Signs of life: this node's own, and those of the others.

A node that gets no answer from the store for `NodeSettings.fence_s` ends its own ranks: others will replace them.
"""

import socket
import threading
import time
from collections.abc import Callable, Collection
from contextlib import suppress

import torch.distributed as dist

from lightning_replica.control import keys
from lightning_replica.launch.environment import connect
from lightning_replica.nodes.life import Life
from lightning_replica.nodes.membership import Member
from lightning_replica.nodes.settings import NodeSettings

_PROBE_S = 1.0


class Pulse:
    """Gives signs of life of this node and finds nodes that give none. Runs in threads of its own.

    Args:
        settings: The nodes' settings.
        own: This node.
        lost: Called from a thread when nodes are found to be lost, with their numbers.
        fenced: Called from a thread when the store has not answered for too long. Must end this process's ranks.
    """

    def __init__(
        self,
        settings: NodeSettings,
        own: Member,
        lost: Callable[[frozenset[int]], None],
        fenced: Callable[[], None],
    ) -> None:
        self._settings, self._own, self._lost, self._fenced = settings, own, lost, fenced
        self._over = threading.Event()
        self._answered = time.monotonic()
        self._life = Life(settings.node_timeout_s, settings.beat_s)
        self._members: dict[int, Member] = {}
        self._gone: frozenset[int] = frozenset()

    @property
    def alive(self) -> frozenset[int]:
        """The numbers of the nodes that are known and not lost, this node included."""
        return frozenset(self._members) - self._gone | {self._own.number}

    def member(self, number: int) -> Member:
        """Return a node that is known."""
        return self._members[number]

    def start(self) -> None:
        """Start the threads."""
        for name, work in (("pulse", self._beat), ("fence", self._fence), ("probe", self._probe)):
            threading.Thread(target=work, name=f"lightning_replica-{name}", daemon=True).start()

    def stop(self) -> None:
        """Stop: this process ends, or its end is no sign of a fault any more."""
        self._over.set()

    def _beat(self) -> None:
        """Raise this node's counter and look at the others', in turns."""
        with suppress(RuntimeError):  # the store is gone: the fence ends this node
            store, count = connect(self._settings.host, self._settings.port), 0
            while not self._over.wait(self._settings.beat_s):
                began, count = time.monotonic(), count + 1
                store.set(keys.beat(self._own.number), str(count))
                come, *counters = store.multi_get([keys.NODES_COME, *map(keys.beat, self._members)])
                self._answered = began
                found = dict(zip(self._members, map(int, counters), strict=True))
                self._report(self._life.look(found, time.monotonic()))
                self._meet(store, int(come))

    def _meet(self, store: dist.Store, come: int) -> None:
        for number in range(come):
            if number not in self._members and store.check([keys.node(number)]):
                self._members[number] = Member.from_json(store.get(keys.node(number)))

    def _report(self, lost: Collection[int]) -> None:
        new = frozenset(lost) - self._gone - {self._own.number}
        if new:
            self._gone |= new
            self._lost(new)

    def _fence(self) -> None:
        while not self._over.wait(self._settings.beat_s / 10):
            if time.monotonic() - self._answered > self._settings.fence_s:
                self._fenced()
                return

    def _probe(self) -> None:
        """Look at once for supervisors that have died, whenever a generation begins."""
        with suppress(RuntimeError):
            store, generation = connect(self._settings.host, self._settings.port), 0
            while True:
                generation += 1
                store.get(keys.generation(generation))
                if self._over.is_set():
                    return
                others = [m for n, m in list(self._members.items()) if n not in self._gone and n != self._own.number]
                self._report([member.number for member in others if is_dead(member)])


def is_dead(member: Member) -> bool:
    """Return whether no process listens at a node's port any more. If there is no answer at all, that is not known."""
    try:
        socket.create_connection((member.address, member.port), _PROBE_S).close()
    except ConnectionRefusedError:
        return True
    except OSError:
        return False
    return False


def listen(address: str) -> socket.socket:
    """Listen at a free port of ``address``, for `is_dead`. Nothing is read from the connections."""
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    listening = socket.socket(family)
    listening.bind((address, 0))
    listening.listen(16)
    threading.Thread(target=_accept, args=(listening,), name="lightning_replica-listen", daemon=True).start()
    return listening


def _accept(listening: socket.socket) -> None:
    with suppress(OSError):  # it is closed when this process ends
        while True:
            listening.accept()[0].close()
