"""The other nodes of a run, for one supervisor: it learns of lost nodes and takes over their ranks.

The log of generations is also the log of placements. A lost node and its ranks' new places are one entry, so whoever
begins the generation has decided where the ranks go, and a node that decides at the same time sees the other's entry
first. The live node with the lowest number that has ranks decides.
"""

import os
import threading
from collections.abc import Callable, Collection
from functools import partial
from typing import Final, NoReturn, TypeAlias

import torch.distributed as dist

from lightning_replica.control import keys
from lightning_replica.control.faults import Fault
from lightning_replica.control.generation import Generations
from lightning_replica.control.untrusted import read
from lightning_replica.core.messages import say, warn
from lightning_replica.errors import ProtocolError
from lightning_replica.exit_codes import GAVE_UP
from lightning_replica.launch.node_context import LOOPBACK
from lightning_replica.launch.others import Put
from lightning_replica.launch.supervisor import Supervisor
from lightning_replica.nodes.failover import NoFailoverError, Stores, agree_on_failover
from lightning_replica.nodes.heartbeats import Heartbeats
from lightning_replica.nodes.listener import Listener
from lightning_replica.nodes.log import Log
from lightning_replica.nodes.membership import Member
from lightning_replica.nodes.node_settings import NodeSettings
from lightning_replica.nodes.placement import VACANT, Placement, ranks_of
from lightning_replica.stores.address import StoreAddress
from lightning_replica.stores.reach import reach

Change: TypeAlias = Callable[[Placement, Collection[int], Collection[int]], Placement]
"""Makes another placement of one, of the lost nodes among those that have slots, and of all nodes that are not lost."""

_AGAIN_S: Final = 1.0
# Of the time that ranks wait for each other: the supervisor must end the wait before they do.
_PATIENCE: Final = 0.95


class Cluster:
    """Implements `Others` and `HeartbeatObserver`.

    Args:
        settings: The nodes' settings.
        stores: The stores of the run.
        node_store: The store of this node's ranks, which this node serves.
        own: This node.
        listener: The port at which this node listens.
        first: The first placement.
        supervisor: This node's supervisor.

    Attributes:
        code: The exit code of the first other node whose ranks have ended; None if there is none yet.
    """

    def __init__(
        self,
        settings: NodeSettings,
        stores: Stores,
        node_store: dist.TCPStore,
        own: Member,
        listener: Listener,
        first: Placement,
        supervisor: Supervisor,
    ) -> None:
        self._settings, self._own, self._supervisor, self._placement = settings, own, supervisor, first
        self._stores, self._listener = stores, listener
        self._reach_near = partial(reach, StoreAddress(LOOPBACK, node_store.port))
        self._generations = Generations(stores.connect())
        self._served: list[dist.TCPStore] = []  # lives as long as this process
        self._known = self._restarts = 0  # the newest entry of the log that was read, and replacements up to it
        self._vacant: dict[int, int] = {}  # slots, and the generation since which no node has them
        self._over = self._introduced = False
        self.code: int | None = None
        self.heartbeats = Heartbeats(settings, own, stores.reach, self)
        self._log = Log(stores.reach, self._reach_near, self._hear, self.heartbeats.send_now)
        listener.on_connection(self.heartbeats.send_now)

    # `Others`: called in the supervisor's main thread

    def begin(self, put: Put) -> None:
        """Begin to watch the other nodes, and the log."""
        self._put = put
        self.heartbeats.start()
        self._log.follow()

    @property
    def restarts(self) -> int:
        """Number of replacements in the log."""
        return self._restarts

    @property
    def patience_s(self) -> float:
        """See `Others.patience_s`."""
        limit_s, doubles_up_s = self._supervisor.patience_s, self._settings.double_up_after_s
        return limit_s if doubles_up_s is None else min(limit_s, doubles_up_s)

    def may_leave(self) -> bool:
        """Return whether the ranks of a node have ended, or no node trains any more."""
        return self._over

    def ended(self) -> None:
        """Note that this node's ranks have ended, so that it may leave."""
        self._over = True
        self._log.stop()

    def relocate(self, fault: Fault) -> str:
        """Give the ranks of lost nodes to spares. See `Others.relocate`."""
        placement = self._append(fault, Placement.replacing)
        return " and ".join(f"node {self.heartbeats.name(node)}" for node in sorted({*self._holders(placement)}))

    def _holders(self, placement: Placement) -> list[int]:
        return [placement.slots[slot] for slot in placement.moved]

    def _append(self, fault: Fault, change: Change) -> Placement:
        """Begin a generation in which nodes have other slots, and return its placement."""
        while True:
            self._catch_up()
            lost, alive = self._placement.nodes - self.heartbeats.alive, self.heartbeats.alive
            placement = change(self._placement, lost, alive)
            if self._generations.begin_first(self._known + 1, fault, placement.to_json()):
                self._catch_up()
                return placement

    def _catch_up(self) -> None:
        while self._generations.begun(self._known + 1):
            self._read(self._known + 1, *self._generations.fault_and_note(self._known + 1))

    # In other threads

    def trains(self) -> frozenset[int]:
        """See `HeartbeatObserver`."""
        return self._placement.nodes

    def came(self) -> None:
        """See `HeartbeatObserver`."""
        self._put(self._fill)

    def introduced(self) -> None:
        """See `HeartbeatObserver`."""
        if not self._introduced and self._own.number not in self._placement.nodes:
            say(f"node {self._own.name} waits as a spare.")
        self._introduced = True

    def lost(self) -> None:
        """See `HeartbeatObserver`."""
        self._put(self._lose)

    def stalls(self) -> bool:
        """See `HeartbeatObserver`."""
        return self._supervisor.stalls

    def all_stall(self) -> None:
        """See `HeartbeatObserver`."""
        self._put(self._call_back)

    def node_is_over(self, node: int, code: int) -> None:
        """See `HeartbeatObserver`."""
        self._put(partial(self._end, node, code))

    def store_is_gone(self) -> None:
        """Agree with the other nodes on another store, in which the run is given up. See `failover`."""
        others, known, phase = self.heartbeats.others(), self._known, self.heartbeats.phase
        try:
            timeout_s = self._settings.node_timeout_s
            found = agree_on_failover(self._own, others, self._placement.nodes, self._listener, known, phase, timeout_s)
        except NoFailoverError:
            self._give_up(f"the process that served the store at {self._endpoint} has ended")
        self._reach_near().set(keys.failover(self._stores.count), str(found.address))
        how = f"The process that served the store at {self._endpoint} has ended"
        self._stores.add(found.address)
        if found.served is not None:
            self._served.append(found.served)
            self._put(partial(self._lose_store, how, found.dead))
        self.heartbeats.mark_lost(found.dead)

    def fence(self) -> None:
        """End this process and its ranks, at once: the main thread may be waiting for the store."""
        self._give_up(f"the store at {self._endpoint} has not answered for {self._settings.fence_s:g} s")

    @property
    def serves(self) -> bool:
        """Whether this node serves a store that took the place of a lost one."""
        return bool(self._served)

    @property
    def _endpoint(self) -> str:
        return self._stores.newest.endpoint

    def _give_up(self, why: str) -> NoReturn:
        self._supervisor.kill()
        warn(f"{why}. The ranks of node {self._own.name} are killed, as others may replace them.")
        os._exit(GAVE_UP)

    def _hear(self, number: int, fault: Fault, note: str) -> None:
        """Take note of an entry of the log. See `log.Entry`."""
        self.heartbeats.probe_now()
        self._put(partial(self._read_and_decide, number, fault, note))

    # In the main thread

    @property
    def _store_was_lost(self) -> bool:
        """Whether this is not the first store, so that the run ends and no rank gets another place."""
        return self._stores.count > 1

    def _lose_store(self, how: str, dead: frozenset[int]) -> None:
        """End the run: the nodes that are left have agreed on another store only for that."""
        lost = sorted(self._placement.nodes - (self.heartbeats.alive - dead))
        slots = [*self._placement.vacant, *(slot for node in lost for slot in self._placement.of(node))]
        how = f"{how}, and {self._say_who(lost)} is lost" if lost else how
        self._supervisor.store_lost(ranks_of(slots, self._settings.nproc_per_node), f"{how}.")

    def _end(self, node: int, code: int) -> None:
        if code and self.code is None and not self._over:  # its messages may be on another console
            say(f"the ranks of node {self.heartbeats.name(node)} have ended with exit code {code}.")
        self.code, self._over = code if self.code is None else self.code, True

    def _read_and_decide(self, number: int, fault: Fault, note: str) -> None:
        if self._read(number, fault, note):
            self._lose()  # a node that has got ranks may be lost meanwhile
            self._fill()  # and others may have come

    def _read(self, number: int, fault: Fault, note: str) -> bool:
        """Take over an entry of the log, unless it is known. Return whether it has changed the placement."""
        if number <= self._known:
            return False
        self._known, self._restarts = number, self._restarts + fault.is_replaced
        if fault.detected == "hang" and not fault.ranks:
            self._supervisor.called_back()
        if not note or self._store_was_lost:
            return False
        before, count = self._placement, len(self._placement.slots)
        found = read(keys.generation(number), note.encode(), _placement_of(count), None)
        if found is None:
            return False
        self._placement = found
        if self._own.number in before.nodes - found.nodes:
            # This process was paused (a snapshot of its virtual machine, a migration), its clock with it.
            self._give_up("this node sent no heartbeat for too long, and other nodes have its ranks now")
        self.heartbeats.mark_lost(before.nodes - self._placement.nodes)  # this node may not watch them
        self._vacant = {slot: self._vacant.get(slot, number) for slot in self._placement.vacant}
        mine = [slot for slot in self._placement.moved if self._placement.slots[slot] == self._own.number]
        if mine:
            ranks = ranks_of(mine, self._settings.nproc_per_node)
            say(f"node {self._own.name} takes over ranks {list(ranks)}.")
            self._supervisor.start(ranks, number)
        return True

    def _call_back(self) -> None:
        """Call all ranks back from their waits, to try again."""
        self._generations.begin_next(self._known, Fault("hang", (), "all ranks wait for each other"))

    def _lose(self) -> None:
        """Decide about nodes that are lost, if this node is the one to do that."""
        if self._store_was_lost and self._generations.verdict() is None:
            return  # `_lose_store` decides about them
        if self._placement.nodes <= self.heartbeats.alive:
            return
        # In the middle of the log, those that trained then may all be dead (tests/nodes/test_cluster.py::
        # test_a_spare_that_has_not_read_the_log_to_its_end_decides_nothing).
        self._catch_up()
        alive = self.heartbeats.alive
        lost, training = sorted(self._placement.nodes - alive), self._placement.nodes & alive
        if not training:
            self._supervisor.abandoned(f"N{self._say_who(lost)[1:]} is lost, and no node is left that trains.")
            self._over = True
        elif lost and self._own.number == min(training):
            slots = [slot for node in lost for slot in self._placement.of(node)]
            ranks = ranks_of(slots, self._settings.nproc_per_node)
            how = f"N{self._say_who(lost)[1:]}, with ranks {list(ranks)}, is lost"
            self._supervisor.node_ended(ranks, how)
            self._wait_for_nodes(how)

    def _say_who(self, nodes: list[int]) -> str:
        return " and ".join(f"node {self.heartbeats.name(node)}" for node in nodes)

    def _fill(self) -> None:
        """Give slots to nodes that have come: vacant ones, if this node is the one to do that, and own ones."""
        who = self._say_who(sorted(self.heartbeats.alive - self._placement.nodes))
        training, fault = self._placement.nodes & self.heartbeats.alive, Fault("peer gone", (), f"{who} has come")
        if who and self._vacant and self._own.number == min(training, default=VACANT):
            self._append(fault, Placement.replacing)
        elif who and not self._vacant:
            self._spread(fault)

    def _spread(self, fault: Fault) -> None:
        """Give the ranks that this node has taken over to nodes that have come. They end here before they begin there.

        No shard is lost with them: its other holders stand in other slots.
        """
        slots = self._placement.crowd(self._own.number)[:1]  # one at a time: others may hold the same shards
        if not slots or not self._generations.store.check([keys.SEPARATE]):
            return
        if not self._has_recovered():
            self._later(_AGAIN_S, self._fill)
        else:
            self._supervisor.release(ranks_of(slots, self._settings.nproc_per_node))
            self._append(fault, lambda placement, lost, alive: placement.replacing(lost, alive).spread(slots, alive))

    def _has_recovered(self) -> bool:
        """Return whether all ranks have what they lack since the newest generation: each then gives an account."""
        return not self._known or self._generations.store.check([keys.result(keys.account(self._known))])

    def _later(self, after_s: float, do: Callable[[], None]) -> None:
        """Have the main thread call a function after some time."""
        timer = threading.Timer(after_s, self._put, [do])
        timer.daemon = True
        timer.start()

    def _wait_for_nodes(self, how: str) -> None:
        """End the run if slots that are vacant now are still vacant when the time to wait is over."""
        if self._vacant:
            expire = partial(self._expire, how, dict(self._vacant))
            self._later(min(self.patience_s, _PATIENCE * self._supervisor.patience_s), expire)

    def _expire(self, how: str, vacant: dict[int, int]) -> None:
        slots = [slot for slot, since in vacant.items() if self._vacant.get(slot) == since]
        if self._over or not slots:
            return
        if self._settings.double_up_after_s is None:
            self._supervisor.no_node_came(ranks_of(slots, self._settings.nproc_per_node), how)
            return
        say(f"{how}, and no other node has come: the nodes that are left run its ranks too, until one comes.")
        fault = Fault("peer gone", (), f"{how}, and the nodes that are left run its ranks")
        self._append(fault, lambda placement, lost, alive: placement.replacing(lost, alive).doubled())


def _placement_of(count: int) -> Callable[[bytes], Placement | None]:
    def parse(note: bytes) -> Placement:
        placement = Placement.from_json(note)
        if len(placement.slots) != count:
            raise ProtocolError(f"{note[:80]!r} has {len(placement.slots)} slots, but the run has {count}")
        return placement

    return parse
