"""Heartbeats: this node's own, and those of the others.

The first nodes with ranks watch all others: one of them decides what is done about a lost node. The others watch only
these, so a node's messages do not grow with the number of nodes.

A node that gets no answer from the store for `NodeSettings.fence_s` ends its own ranks: others will replace them.
"""

import threading
import time
from collections.abc import Callable, Collection, Mapping
from functools import partial
from typing import Final, Protocol

import torch.distributed as dist

from lightning_replica.control import keys
from lightning_replica.control.phase import Phase, phase_from
from lightning_replica.control.untrusted import read
from lightning_replica.errors import ProtocolError
from lightning_replica.nodes.listener import is_dead
from lightning_replica.nodes.liveness import Heartbeat, Liveness
from lightning_replica.nodes.membership import Member, come
from lightning_replica.nodes.node_settings import NodeSettings
from lightning_replica.nodes.reconnecting_store import ReconnectingStore, StoreGoneError
from lightning_replica.stores.tagged import peek

_FENCE_LOOKS: Final = 50  # during the time-out
_LATE_S: Final = 1.0
# A machine that is killed loses its ranks and its supervisor one after the other.
_PROBES_S: Final = (0.0, 0.5)
_WATCHERS: Final = 3  # so many may be lost at once before the next one has to find out by itself


class HeartbeatObserver(Protocol):
    """What `Heartbeats` reports to. All methods are called from its threads."""

    def trains(self) -> frozenset[int]:
        """Return the numbers of the nodes that have ranks."""

    def came(self) -> None:
        """Other nodes have come."""

    def introduced(self) -> None:
        """The nodes with ranks were told that this node has come, which has none."""

    def lost(self) -> None:
        """Nodes were found to be lost."""

    def stalls(self) -> bool:
        """Return whether all ranks of this node wait for others for too long."""

    def all_stall(self) -> None:
        """All ranks of all nodes wait for each other."""

    def node_is_over(self, node: int, code: int) -> None:
        """The ranks of another node have ended, with an exit code."""

    def store_is_gone(self) -> None:
        """The process that served the store has ended. Returns when there is another, or ends this process."""

    def fence(self) -> None:
        """The store has not answered for too long. Must end this process and its ranks."""


class Heartbeats:
    """Sends the heartbeats of this node and finds nodes that send none. Runs in threads of its own.

    Args:
        settings: The nodes' settings.
        own: This node.
        open_store: Opens a new connection to the store; see `ReconnectingStore`.
        observer: What it reports to.

    Attributes:
        phase: Where the run is, as last heard.
    """

    def __init__(
        self, settings: NodeSettings, own: Member, open_store: Callable[[], dist.Store], observer: HeartbeatObserver
    ) -> None:
        self._settings, self._own, self._open, self._observer = settings, own, open_store, observer
        self._stopped, self._now, self._news = threading.Event(), threading.Event(), threading.Event()
        self._code: int | None = None
        self._end_written = threading.Event()
        self._over: frozenset[int] = frozenset()
        self.phase: Phase = "set-up"
        self._answered = time.monotonic()
        self._liveness = Liveness(settings.node_timeout_s, settings.beat_s)
        self._sent = Heartbeat()
        self._newest: dict[int, Heartbeat] = {}  # the newest of each node that could be read
        self._members: dict[int, Member] = {own.number: own}
        self._gone: frozenset[int] = frozenset()
        self._marking = threading.Lock()
        self._reported: frozenset[int] = frozenset()  # the lost nodes that have been reported to the observer

    @property
    def alive(self) -> frozenset[int]:
        """The numbers of the nodes with ranks, and of others it knows, that this node does not know to be lost."""
        return (frozenset(self._members) | self._observer.trains()) - self._gone

    @property
    def watched(self) -> list[int]:
        """The numbers of the nodes whose heartbeats this node reads."""
        watchers = self._watchers
        return sorted(self.alive - {self._own.number}) if self._watches_all(watchers) else watchers

    @property
    def _watchers(self) -> list[int]:
        return sorted(self.alive & self._observer.trains())[:_WATCHERS]

    def _watches_all(self, watchers: list[int]) -> bool:
        return self._own.number in watchers or not watchers

    @property
    def pause_s(self) -> float:
        """How long to wait before the next request, in seconds.

        A reply to an old request says little about now: the link may be down again before the next one is due.
        """
        is_late = time.monotonic() - self._answered > _LATE_S
        return 0.0 if is_late else self._liveness.next_look_s

    def others(self) -> list[Member]:
        """Return the other nodes that this one knows, that are alive and whose ranks have not ended."""
        known = frozenset(self._members) - self._gone - self._over - {self._own.number}
        return [self._members[number] for number in sorted(known)]

    def send_now(self) -> None:
        """Send a heartbeat now, as another node may have lost the store. Does not wait."""
        self._now.set()

    def name(self, number: int) -> str:
        """Return the name of a node."""
        return self._members[number].name if number in self._members else str(number)

    def start(self) -> None:
        """Start the threads."""
        self._answered = time.monotonic()
        for name, work in (("heartbeats", self._beat), ("fence", self._fence), ("probe", self._probe)):
            threading.Thread(target=work, name=f"lightning_replica-{name}", daemon=True).start()

    def stop(self) -> None:
        """Stop: this process ends, or its end counts as a fault no more."""
        self._stopped.set()
        self._now.set()
        self._news.set()

    def report_end(self, code: int) -> None:
        """Report to the other nodes that the ranks of this node have ended. Return when it is written."""
        self._code = code
        self._now.set()
        self._end_written.wait(self._settings.node_timeout_s)

    def probe_now(self) -> None:
        """Look for supervisors that have died, because there is a fault. Does not wait."""
        self._news.set()

    def _beat(self) -> None:
        """Write this node's heartbeat and read those of the others, in turns."""
        store, count, due = ReconnectingStore(self._open), 0, True
        while not self._stopped.is_set():
            count += 1
            try:
                self._exchange(store, Heartbeat(count, self._code, self._observer.stalls()), due)
            except StoreGoneError:
                if not self._stopped.is_set():
                    self._observer.store_is_gone()
                store, self._answered = ReconnectingStore(self._open), time.monotonic()
                continue
            due = self._now.wait(self.pause_s)
            self._now.clear()

    def _exchange(self, store: ReconnectingStore, own: Heartbeat, due: bool) -> None:
        """Write a heartbeat, read those of the nodes that this one watches, and report what has changed.

        Args:
            store: The store.
            own: This node's heartbeat.
            due: Whether there is a reason to look now. A node that decides nothing else looks every other time only.
        """
        gone = self._gone
        watchers = self._watchers
        knows_all = self._watches_all(watchers)
        self._answered = store.request(partial(_send, self._own.number, self._sent, own)).sent_at
        self._sent = own
        if own.code is not None:
            self._end_written.set()
        if own.count % 2 and not (knows_all or due):
            return
        # That this was answered does not put off the fence: others count from the heartbeat that they have seen.
        self.phase, come, found = store.request(partial(_read_heartbeats, self.watched, knows_all)).value
        received = {number: self._parse(number, value) for number, value in found.items()}
        self._newest.update(received)
        self._find_over(received)
        if own.stalls and self._own.number in watchers[:1]:
            self._find_stall(received)
        self.mark_lost(self._liveness.look(received, time.monotonic()))
        self._meet(store, range(come) if knows_all else watchers)
        # Only those that were lost when the look began: because of the loss, this node may be one that decides, and so
        # must know the spares. A node that is lost meanwhile leads to another look at once.
        if gone != self._reported:
            self._reported = gone
            self._observer.lost()

    def _parse(self, number: int, value: bytes) -> Heartbeat:
        """Return a node's heartbeat. One that a stranger has written over is no new heartbeat."""
        return read(keys.beat(number), value, Heartbeat.from_json, self._newest.get(number, Heartbeat()))

    def _find_stall(self, received: Mapping[int, Heartbeat]) -> None:
        """Report it if all ranks of other nodes wait too. Only the first node with ranks looks."""
        if self._liveness.all_stall(received, self._observer.trains() & self.alive - {self._own.number}):
            self._observer.all_stall()

    def _find_over(self, received: Mapping[int, Heartbeat]) -> None:
        for number, heartbeat in received.items():
            if heartbeat.code is not None and number not in self._over:
                self._over |= {number}
                self._observer.node_is_over(number, heartbeat.code)

    def _meet(self, store: ReconnectingStore, wanted: Collection[int]) -> None:
        """Get to know the nodes that this one watches: where they are, and what they are called."""
        new = [number for number in wanted if number not in self._members]
        if not new:
            return
        found = store.request(partial(_members, new)).value
        self._members = {**self._members, **found}
        if found:
            self._observer.came()
            if self._own.number not in self._observer.trains():
                # They look at once, and so know this spare. Otherwise, if the store were lost within the next second,
                # they would not wait for it when they agree on another.
                threading.Thread(target=self._introduce, args=(tuple(found.values()),), daemon=True).start()

    def _introduce(self, members: Collection[Member]) -> None:
        for member in members:
            is_dead(member)  # which connects to its listener
        self._observer.introduced()

    def mark_lost(self, lost: Collection[int]) -> None:
        """Count nodes as lost, and report that after the next look, which is now. Any thread may call this."""
        with self._marking:
            new = frozenset(lost) - self._gone
            self._gone |= new
        if new:
            self._now.set()

    def _fence(self) -> None:
        while not self._stopped.wait(self._settings.node_timeout_s / _FENCE_LOOKS):
            if time.monotonic() - self._answered > self._settings.fence_s:
                self._observer.fence()
                return

    def _probe(self) -> None:
        while True:
            self._news.wait()
            self._news.clear()
            for pause_s in _PROBES_S:
                if self._stopped.wait(pause_s):
                    return
                watched = set(self.watched)
                self.mark_lost([each.number for each in self.others() if each.number in watched and is_dead(each)])


def _send(number: int, before: Heartbeat, own: Heartbeat, store: dist.Store) -> None:
    """Write the heartbeat of a node. Return when the store has it: a store does not answer to `set`."""
    said = own.to_json()
    if store.compare_set(keys.beat(number), before.to_json(), said) != said.encode():
        store.set(keys.beat(number), said)  # a stranger has written over it


def _read_heartbeats(others: list[int], counts: bool, store: dist.Store) -> tuple[Phase, int, dict[int, bytes]]:
    """Return the phase, how many nodes have come if asked for, and the heartbeats of other nodes."""
    phase, *received = peek(store, [keys.PHASE, *map(keys.beat, others)])
    return phase_from(phase), come(store) if counts else 0, dict(zip(others, received, strict=True))


def _member(number: int) -> Callable[[bytes], Member | None]:
    def parse(value: bytes) -> Member | None:
        member = Member.from_json(value)
        if member.number != number:
            raise ProtocolError(f"{value[:80]!r} is not node {number}")
        return member

    return parse


def _members(numbers: list[int], store: dist.Store) -> dict[int, Member]:
    """Return those of some nodes that have made themselves known. A node may die before it has."""
    names = [keys.node(number) for number in numbers]
    if store.check(names):
        values = zip(numbers, names, store.multi_get(names), strict=True)
        found = {number: read(name, value, _member(number), None) for number, name, value in values}
        return {number: member for number, member in found.items() if member is not None}
    half = len(numbers) // 2
    return {**_members(numbers[:half], store), **_members(numbers[half:], store)} if half else {}
