"""The other nodes of a run, for one supervisor: it learns of lost nodes and takes over their ranks."""

import os
import threading
from collections.abc import Callable
from contextlib import suppress

import torch.distributed as dist

from lightning_replica.control import keys
from lightning_replica.control.faults import Fault
from lightning_replica.control.generation import Generations
from lightning_replica.core.messages import say, warn
from lightning_replica.exit_codes import GAVE_UP
from lightning_replica.launch.environment import connect
from lightning_replica.launch.others import Put
from lightning_replica.launch.supervisor import Supervisor
from lightning_replica.nodes.membership import Member
from lightning_replica.nodes.placement import Placement, ranks_of
from lightning_replica.nodes.pulse import Pulse
from lightning_replica.nodes.settings import NodeSettings


class Cluster:
    """Implements `Others`: the main thread of the supervisor calls it.

    Args:
        settings: The nodes' settings.
        store: The store of the run.
        own: This node.
        first: The first placement.
        supervisor: Returns this node's supervisor.
    """

    def __init__(
        self,
        settings: NodeSettings,
        store: dist.Store,
        own: Member,
        first: Placement,
        supervisor: Callable[[], Supervisor],
    ) -> None:
        self._settings, self._store, self._own, self._supervisor = settings, store, own, supervisor
        self._placement, self._number, self._over = first, 0, False
        self.pulse = Pulse(settings, own, self._found_lost, self._fence)

    def begin(self, put: Put) -> None:
        """Begin to watch the other nodes, and the placements."""
        self._put = put
        self.pulse.start()
        threading.Thread(target=self._follow, name="lightning_replica-placements", daemon=True).start()
        threading.Thread(target=self._await_end, name="lightning_replica-over", daemon=True).start()

    def may_leave(self) -> bool:
        """Return whether a node has ended: all ranks end together."""
        return self._over

    def ended(self) -> None:
        """Tell the other nodes that ranks have ended, so that spares end too."""
        if not self._over:
            self._over = True
            self._store.set(keys.NODES_OVER, "")

    def relocate(self, ranks: tuple[int, ...], fault: Fault) -> str:
        """Give the ranks of lost nodes to spares."""
        generation = Generations(self._store).begin_next(0, fault)
        lost = frozenset(self._placement.slots) - self.pulse.alive
        placement = self._placement.replacing(lost, self.pulse.alive, generation)
        if placement is None:
            raise RuntimeError(f"there is no spare for ranks {ranks}")  # the caller has seen one
        self._store.compare_set(keys.placement(self._number + 1), "", placement.to_json())
        takers = sorted({placement.slots[slot] for slot in placement.moved})
        return " and ".join(f"node {self.pulse.member(node).name}" for node in takers)

    # In other threads

    def _found_lost(self, _: frozenset[int]) -> None:
        self._put(self._lose)

    def _follow(self) -> None:
        with suppress(RuntimeError):  # the store is gone: the fence ends this node
            store, number = connect(self._settings.host, self._settings.port), 0
            while True:
                number += 1
                placement = Placement.from_json(store.get(keys.placement(number)))
                self._put(lambda number=number, placement=placement: self._place(number, placement))  # type: ignore[misc]

    def _await_end(self) -> None:
        with suppress(RuntimeError):
            connect(self._settings.host, self._settings.port).get(keys.NODES_OVER)
            self._put(self._end)

    def _fence(self) -> None:
        """End this process and its ranks, at once: the main thread may be waiting for the store."""
        self._supervisor().kill()
        warn(
            f"the store at {self._settings.host}:{self._settings.port} has not answered for"
            f" {self._settings.fence_s:g} s. The ranks of node {self._own.name} are killed, as others may replace them."
        )
        os._exit(GAVE_UP)

    # In the main thread

    def _end(self) -> None:
        self._over = True

    def _place(self, number: int, placement: Placement) -> None:
        self._placement, self._number = placement, number
        mine = [slot for slot in placement.moved if placement.slots[slot] == self._own.number]
        if mine:
            ranks = ranks_of(mine, self._settings.nproc_per_node)
            say(f"node {self._own.name} takes over ranks {list(ranks)}.")
            self._supervisor().start(ranks, placement.generation)
        self._lose()  # those that were lost meanwhile

    def _lose(self) -> None:
        """Decide about nodes of the placement that are lost. The live node with the lowest number does that."""
        alive = self.pulse.alive
        lost = sorted(set(self._placement.slots) - alive)
        training = set(self._placement.slots) & alive
        if not lost or self._over or self._own.number != min(training, default=-1):
            return
        slots = [slot for node in lost for slot in self._placement.of(node)]
        ranks = ranks_of(slots, self._settings.nproc_per_node)
        names = " and ".join(f"node {self.pulse.member(node).name}" for node in lost)
        how = f"{names[0].upper()}{names[1:]}, with ranks {list(ranks)}, is lost"
        spare = self._placement.replacing(lost, alive, 0) is not None
        self._supervisor().node_ended(ranks, how, spare)
