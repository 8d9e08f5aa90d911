"""What a node learns of the others, with real stores and threads: two nodes that train, and others that come later."""

import queue
import time
from collections.abc import Callable, Iterator, Mapping
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch.distributed as dist

from lightning_replica.control import keys
from lightning_replica.control.faults import Fault
from lightning_replica.control.generation import Generations
from lightning_replica.exit_codes import GAVE_UP
from lightning_replica.launch.supervisor import Supervisor
from lightning_replica.nodes.cluster import Cluster
from lightning_replica.nodes.failover import Stores
from lightning_replica.nodes.listener import Listener, is_dead
from lightning_replica.nodes.liveness import Heartbeat
from lightning_replica.nodes.membership import Member, register
from lightning_replica.nodes.node_settings import NodeSettings
from lightning_replica.nodes.placement import Placement
from lightning_replica.nodes.reconnecting_store import ReconnectingStore, StoreGoneError
from lightning_replica.stores.address import StoreAddress
from lightning_replica.stores.tcp import connect, serve

FAULT = Fault("death", (0,), "Rank 0 died")


class Node:
    """A node with a cluster, and a supervisor that writes down what it is told."""

    def __init__(self, settings: NodeSettings, name: str, patience_s: float = 60.0, nodes: int = 2) -> None:
        self.patience_s, self.heard, self._events = patience_s, [], queue.SimpleQueue()  # type: ignore[var-annotated]
        self.stores, self.listener, self.node_store = Stores(settings.store), Listener("127.0.0.1"), serve("127.0.0.1")
        self.store, self.dead = self.stores.connect(), False
        own = register(self.store, "127.0.0.1", self.listener.port, name)
        supervisor, first = cast("Supervisor", self), Placement(tuple(range(nodes)))
        self.cluster = Cluster(settings, self.stores, self.node_store, own, self.listener, first, supervisor)
        self.cluster.begin(self._events.put)

    def start(self, ranks: tuple[int, ...], generation: int) -> None:
        self.heard.append(("start", ranks, generation))

    stalls = False

    def kill(self) -> None:
        self.heard.append(("killed",))

    def called_back(self) -> None:
        self.heard.append(("called back",))

    def release(self, ranks: tuple[int, ...]) -> None:
        self.heard.append(("release", ranks))

    def node_ended(self, ranks: tuple[int, ...], how: str) -> None:
        self.heard.append((ranks, how, self.cluster.relocate(Fault("death", ranks, how))))

    def no_node_came(self, ranks: tuple[int, ...], how: str) -> None:
        self.heard.append(("nobody", ranks, how))

    def abandoned(self, how: str) -> None:
        self.heard.append(("abandoned", how))

    def until(self, ready: Callable[[], bool]) -> None:
        """Do what the supervisor's main thread would do."""
        while not ready():
            self._events.get()()

    def store_lost(self, ranks: tuple[int, ...], how: str) -> None:
        self.heard.append(("store", ranks, how))

    def die(self) -> None:
        """Send no further heartbeat. The operating system would close the socket."""
        if not self.dead:
            self.dead = True
            self.cluster.heartbeats.stop()
            self.cluster.ended()
            self.listener.close()


@pytest.fixture
def make(request: pytest.FixtureRequest) -> Iterator[Callable[..., Node]]:
    store = serve("127.0.0.1")
    made: list[Node] = []

    def make(name: str, double_up_after_s: float | None = None, **options: Any) -> Node:
        address = StoreAddress("127.0.0.1", store.port)
        settings = NodeSettings(2, 2, address, "none", "127.0.0.1", 0, 60.0, double_up_after_s=double_up_after_s)
        made.append(Node(settings, name, **options))
        return made[-1]

    yield make
    for node in made:
        node.die()
    for number in range(1, 9):  # wake the threads that wait for the log
        Generations(store).begin(number, FAULT)


def know(*nodes: Node, count: int) -> None:
    """Waits until each of some nodes knows that many others, without waiting for its next look."""
    while any(len(node.cluster.heartbeats.others()) < count for node in nodes):
        for node in nodes:
            node.cluster.heartbeats.send_now()
        time.sleep(0.01)


def test_a_spare_gets_the_ranks_and_the_decision_is_made_once(make: Callable[..., Node]) -> None:
    a, b, c, d = (make(name) for name in "abcd")
    know(a, count=3)
    know(c, d, count=2)
    b.die()
    Generations(a.store).begin(1, FAULT)  # a rank has noticed; so nodes look
    a.until(lambda: bool(a.heard))
    assert a.heard == [((2, 3), "Node b, with ranks [2, 3], is lost", "node c")]
    c.until(lambda: bool(c.heard))
    assert c.heard == [("start", (2, 3), 2)]
    d.until(lambda: d.cluster._known == 2)
    a.until(lambda: a.cluster._known == 2)
    a.cluster._lose()  # as when another node is lost before the log has been read
    assert len(a.heard) == 1
    assert [node.cluster.restarts for node in (a, c, d)] == [2, 2, 2]


def test_without_a_spare_the_ranks_wait_for_a_node_that_comes(make: Callable[..., Node]) -> None:
    a, b = make("a"), make("b")
    know(a, count=1)
    b.die()
    a.cluster.heartbeats.probe_now()
    a.until(lambda: bool(a.heard))
    assert a.heard == [((2, 3), "Node b, with ranks [2, 3], is lost", "")]
    c = make("c")
    know(a, count=1)
    a.until(lambda: a.cluster._known == 2)
    c.until(lambda: bool(c.heard))
    assert c.heard == [("start", (2, 3), 2)]
    assert c.cluster.restarts == 1


def test_a_supervisor_that_dies_after_its_ranks_is_found_at_once(
    make: Callable[..., Node], monkeypatch: pytest.MonkeyPatch
) -> None:
    a, b = make("a"), make("b")
    know(a, count=1)
    probes: list[bool] = []

    def probe(member: Member) -> bool:
        probes.append(is_dead(member))
        b.die()
        return probes[-1]

    monkeypatch.setattr("lightning_replica.nodes.heartbeats.is_dead", probe)
    a.cluster.heartbeats.probe_now()
    a.until(lambda: bool(a.heard))
    assert a.heard == [((2, 3), "Node b, with ranks [2, 3], is lost", "")]
    assert probes[0] is False
    assert len(probes) > 1  # it is probed again, whether its listener is closed by then or not


def test_the_wait_for_a_node_ends(make: Callable[..., Node]) -> None:
    a, b = make("a", patience_s=0.1), make("b")
    know(a, count=1)
    b.die()
    a.cluster.heartbeats.probe_now()
    a.until(lambda: len(a.heard) == 2)
    assert a.heard[1] == ("nobody", (2, 3), "Node b, with ranks [2, 3], is lost")


def test_a_node_that_is_left_runs_the_ranks_until_another_comes(make: Callable[..., Node]) -> None:
    a, b = make("a", double_up_after_s=0.1), make("b", double_up_after_s=0.1)
    know(a, count=1)
    b.die()
    a.cluster.heartbeats.probe_now()
    a.until(lambda: len(a.heard) == 2)
    assert a.heard[1] == ("start", (2, 3), 2)
    a.store.set(keys.SEPARATE, "")
    c = make("c")
    know(a, count=1)
    for _ in range(3):  # ranks lack something: whoever was killed now might have the only copy
        a._events.get()()
    assert len(a.heard) == 2
    a.store.set(keys.result(keys.account(2)), "{}")
    a.until(lambda: a.cluster._known == 3)
    assert a.heard[2:] == [("release", (2, 3))]
    c.until(lambda: bool(c.heard))
    assert c.heard == [("start", (2, 3), 3)]


def test_a_spare_that_has_not_read_the_log_to_its_end_decides_nothing(make: Callable[..., Node]) -> None:
    """In the middle of the log, those that trained then may all be dead. It would have given the run up."""
    a, *_ = [make(name) for name in "abcd"]
    for number, slots in ((1, (2, 1)), (2, (2, 3))):
        assert Generations(a.store).begin_first(number, FAULT, Placement(slots).to_json())
    e = make("e")
    e.cluster.heartbeats.mark_lost({0, 1, 2})
    e.until(lambda: e.cluster._known == 2)
    e.cluster._lose()
    assert not e.heard


def test_a_bad_placement_starts_no_rank_a_second_time(make: Callable[..., Node]) -> None:
    """What the entry before it has moved is not moved again: there would be two processes of one rank."""
    a, _, c = (make(name) for name in "abc")
    log = Generations(a.store)
    assert log.begin_first(1, FAULT, Placement((0, 2), (1,)).to_json())
    assert log.begin_first(2, FAULT, "what?")
    c.until(lambda: c.cluster._known == 2)
    assert c.heard == [("start", (2, 3), 1)]


def test_a_node_whose_ranks_others_have_ends(
    make: Callable[..., Node], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """It was paused, and its clock with it: it does not know that it was silent."""
    exits: list[int] = []

    def leave(code: int) -> None:
        exits.append(code)
        raise SystemExit(code)

    _, b, c = (make(name) for name in "abc")
    monkeypatch.setattr("lightning_replica.nodes.cluster.os._exit", leave)
    assert Generations(b.store).begin_first(1, FAULT, Placement((0, 2), (1,)).to_json())
    with pytest.raises(SystemExit):
        b.until(lambda: False)
    assert (b.heard, exits) == ([("killed",)], [GAVE_UP])
    assert "this node sent no heartbeat for too long" in caplog.text
    c.until(lambda: bool(c.heard))
    assert c.heard == [("start", (2, 3), 1)]


def test_a_node_that_runs_the_only_holders_of_a_shard_keeps_them(make: Callable[..., Node]) -> None:
    a, b = make("a", double_up_after_s=0.1), make("b", double_up_after_s=0.1)
    know(a, count=1)
    b.die()
    a.cluster.heartbeats.probe_now()
    a.until(lambda: len(a.heard) == 2)
    a.store.set(keys.result(keys.account(2)), "{}")
    make("c")
    know(a, count=1)
    a.cluster._fill()
    assert len(a.heard) == 2


def test_a_spare_does_not_wait_where_nobody_trains(make: Callable[..., Node]) -> None:
    a, b, c = (make(name) for name in "abc")
    know(c, count=2)
    a.die()
    b.die()
    c.cluster.heartbeats.probe_now()
    c.until(c.cluster.may_leave)
    assert c.heard == [("abandoned", "Node a and node b is lost, and no node is left that trains.")]


def test_the_first_nodes_watch_all_others_and_the_others_watch_them(make: Callable[..., Node]) -> None:
    """So messages do not grow with the square of the number of nodes; and others watch when these have died."""
    a, b, c, d, e, f = [make(name, nodes=5) for name in "abcdef"]
    know(a, b, c, count=5)
    know(d, e, f, count=3)
    assert [node.cluster.heartbeats.watched for node in (a, b, c)] == [
        [1, 2, 3, 4, 5],
        [0, 2, 3, 4, 5],
        [0, 1, 3, 4, 5],
    ]
    assert [node.cluster.heartbeats.watched for node in (d, e, f)] == [[0, 1, 2]] * 3
    for node in (a, b, e):
        node.die()
    c.cluster.heartbeats.probe_now()
    c.until(lambda: bool(c.heard))
    ranks = (0, 1, 2, 3, 8, 9)
    assert c.heard == [(ranks, f"Node a and node b and node e, with ranks {list(ranks)}, is lost", "node f")]
    for node in (d, f):
        node.until(lambda node=node: node.cluster._known == 1)  # type: ignore[misc]
        know(node, count=2)
    assert [node.cluster.heartbeats.watched for node in (c, d, f)] == [[3, 5], [2, 5], [2, 3]]
    c.die()
    d.cluster.heartbeats.probe_now()
    d.until(lambda: bool(d.heard))
    assert d.heard == [((4, 5), "Node c, with ranks [4, 5], is lost", "")]


def test_a_node_that_comes_to_decide_knows_the_spares(make: Callable[..., Node]) -> None:
    """Before, it watched only nodes with ranks. It would have found no spare, and let the ranks wait for one."""
    a, b, c, d, _e, f = (make(name, nodes=5) for name in "abcdef")
    know(d, f, count=3)
    for node in (a, b, c):
        node.die()
    d.cluster.heartbeats.probe_now()
    d.until(lambda: bool(d.heard))  # its main thread is idle, so it decides as soon as it is told
    ranks = (0, 1, 2, 3, 4, 5)
    assert d.heard == [(ranks, f"Node a and node b and node c, with ranks {list(ranks)}, is lost", "node f")]


def test_nodes_that_are_lost_during_a_look_are_told_after_the_next_one(make: Callable[..., Node]) -> None:
    """Before, the node decided without the spares: the look had begun while others were to decide."""
    a, b, c, d, _e, f = (make(name, nodes=5) for name in "abcdef")
    know(d, f, count=3)
    heartbeats, found, decide = d.cluster.heartbeats, d.cluster.heartbeats._find_over, d.cluster.lost
    known: list[list[str]] = []

    def lost() -> None:
        known.append([other.name for other in heartbeats.others()])
        decide()

    def lose(received: Mapping[int, Heartbeat]) -> None:
        heartbeats._find_over = found  # type: ignore[method-assign]
        for node in (a, b, c):
            node.die()
        heartbeats.mark_lost((0, 1, 2))
        found(received)

    d.cluster.lost = lost  # type: ignore[method-assign]
    heartbeats._find_over = lose  # type: ignore[method-assign]
    d.until(lambda: bool(d.heard))
    assert known == [["e", "f"]]
    ranks = (0, 1, 2, 3, 4, 5)
    assert d.heard == [(ranks, f"Node a and node b and node c, with ranks {list(ranks)}, is lost", "node f")]


def test_ranks_of_several_nodes_that_wait_for_each_other_are_called_back(make: Callable[..., Node]) -> None:
    a, b, c = make("a"), make("b"), make("c")
    know(a, count=2)
    know(b, c, count=2)

    def look(*nodes: Node) -> None:
        """Two more heartbeats of each node."""
        for _ in range(2):
            for node in nodes:
                count = node.cluster.heartbeats._liveness._looked
                node.cluster.heartbeats.send_now()
                while node.cluster.heartbeats._liveness._looked == count:
                    time.sleep(0.01)

    for node in (a, c):  # a spare says so too, and it does not matter
        node.stalls = True
    look(b, c, a, b, c, a)
    while not a._events.empty():
        a._events.get()()
    assert Generations(a.store).newest(0) == 0
    b.stalls = True
    look(b, a, b, a)
    for node in (a, b):
        node.until(lambda node=node: ("called back",) in node.heard)  # type: ignore[misc]
    assert Generations(a.store).fault(1) == Fault("hang", (), "all ranks wait for each other")


def test_a_spare_ends_with_the_code_of_the_others(make: Callable[..., Node]) -> None:
    a, c = make("a"), make("c")
    know(a, c, count=1)
    a.cluster.heartbeats.report_end(75)
    while c.cluster.heartbeats._over != {0}:
        c.cluster.heartbeats._now.set()
        time.sleep(0.01)
    c.until(c.cluster.may_leave)
    assert c.cluster.code == 75


def test_a_request_is_sent_again_over_a_new_connection() -> None:
    store = serve("127.0.0.1")
    store.set("a", "1")
    opened: list[dist.Store] = []

    def open_store() -> dist.Store:
        opened.append(connect("127.0.0.1", store.port))
        return opened[-1]

    def work(connection: dist.Store) -> bytes:
        return connection.get("never" if connection is opened[0] else "a")  # the first connection stalls

    reconnecting = ReconnectingStore(open_store)
    first, second = reconnecting.request(work), reconnecting.request(work)
    assert first.value == second.value == b"1"
    assert second.sent_at > first.sent_at
    assert len(opened) >= 2  # on a busy machine a reply may be late, and the request is sent once more
    store.set("never", "")


def test_after_a_late_reply_the_next_request_follows_at_once(
    make: Callable[..., Node], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A link that is down for less than the time-out again and again does not end the node."""
    heartbeats = make("a").cluster.heartbeats
    assert 0 < heartbeats.pause_s <= heartbeats._settings.beat_s
    later = time.monotonic() + 2
    monkeypatch.setattr("lightning_replica.nodes.heartbeats.time", SimpleNamespace(monotonic=lambda: later))
    assert heartbeats.pause_s == 0


def test_a_store_that_has_ended() -> None:
    def refused() -> dist.Store:
        raise ConnectionRefusedError

    with pytest.raises(StoreGoneError):
        ReconnectingStore(refused).request(lambda store: store.get(keys.JOB))
