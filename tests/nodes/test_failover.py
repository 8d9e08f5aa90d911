"""The store of the run is lost, with real processes and sockets: the nodes that are left agree on another, or end."""

import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch.distributed as dist

from lightning_replica.control import keys
from lightning_replica.control.faults import Fault
from lightning_replica.control.generation import Generations
from lightning_replica.nodes.failover import NoFailoverError, agree_on_failover
from lightning_replica.nodes.listener import Listener, is_dead
from lightning_replica.nodes.membership import Member
from lightning_replica.nodes.node_settings import NodeSettings
from lightning_replica.stores.address import StoreAddress, parse
from lightning_replica.stores.shared import SharedStore
from lightning_replica.stores.tcp import connect, serve
from tests.nodes.test_cluster import Node, know
from tests.support.stores import store_process

WHY = "The process that served the store at 127.0.0.1:{} has ended"


@pytest.fixture
def run() -> Iterator[tuple[Callable[[str], Node], Callable[[], None], int]]:
    """Makes nodes, and kills the process that serves their store."""
    made: list[Node] = []
    with store_process() as (port, process):
        settings = NodeSettings(2, 2, StoreAddress("127.0.0.1", port), "none", "127.0.0.1", node_timeout_s=6000.0)

        def make(name: str) -> Node:
            made.append(Node(settings, name))
            return made[-1]

        def kill() -> None:
            process.kill()
            process.join()

        yield make, kill, port
        for node in made:
            node.die()


def woken(*nodes: Node) -> None:
    for node in nodes:
        node.cluster.heartbeats.send_now()


def failover_stores(*nodes: Node) -> list[str]:
    """The address that each node gives its ranks; waits for it."""
    return [connect("127.0.0.1", node.node_store.port).get(keys.failover(1)).decode() for node in nodes]


def test_the_first_node_serves_the_next_store(run: Any) -> None:
    make, kill, port = run
    a, b, c = make("a"), make("b"), make("c")
    know(a, b, c, count=2)
    a.store.set(keys.PHASE, "fit")
    for node in (a, b, c):
        while node.cluster.heartbeats.phase != "fit":
            woken(node)
    Generations(b.store).begin(1, Fault("exception", (1,), "x"))
    kill()
    woken(a)  # the others notice when it comes to them
    assert failover_stores(a, b, c) == [f"127.0.0.1:{a.listener.port}"] * 3
    a.until(lambda: bool(a.heard))
    assert a.heard == [("store", (), f"{WHY.format(port)}.")]
    assert not b.heard
    b.store.set("x", "1")  # connections that were open before have moved
    assert c.store.get("x") == b"1"
    assert b.store.get(keys.PHASE) == b"fit"
    assert Generations(b.store).newest(0) > 1
    assert a.cluster.serves
    assert not b.cluster.serves


@pytest.mark.parametrize(("dies", "ranks"), [("b", (2, 3)), ("a", (0, 1))])
def test_nodes_that_die_with_the_store(run: Any, dies: str, ranks: tuple[int, ...]) -> None:
    make, kill, port = run
    nodes = {name: make(name) for name in "abc"}
    know(*nodes.values(), count=2)
    nodes.pop(dies).die()
    kill()
    first = next(iter(nodes.values()))
    woken(*nodes.values())
    assert failover_stores(*nodes.values()) == [f"127.0.0.1:{first.listener.port}"] * 2
    first.until(lambda: bool(first.heard))
    assert first.heard == [("store", ranks, f"{WHY.format(port)}, and node {dies} is lost.")]


def test_all_nodes_notice_at_once_that_the_store_is_lost(run: Any) -> None:
    """Without being asked to look, and long before their next heartbeats: a spare that is late finds nobody."""
    make, kill, _ = run
    nodes = a, *_ = make("a"), make("b"), make("c")
    know(*nodes, count=2)
    kill()
    assert failover_stores(*nodes) == [f"127.0.0.1:{a.listener.port}"] * 3


def test_a_node_that_does_not_come_might_still_train_so_nobody_writes() -> None:
    listeners = [Listener("127.0.0.1") for _ in range(3)]
    a, b, c = (Member(number, "127.0.0.1", listener.port, "abc"[number]) for number, listener in enumerate(listeners))
    found: list[Any] = []

    def find(own: Member, others: list[Member], listener: Listener) -> None:
        try:
            found.append(agree_on_failover(own, others, {own.number}, listener, 0, "fit", 0.5))
        except NoFailoverError as error:
            found.append(error)

    threads = [
        threading.Thread(target=find, args=arguments)
        for arguments in [(a, [b, c], listeners[0]), (b, [a, c], listeners[1])]
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert [type(each) for each in found] == [NoFailoverError] * 2
    listeners[1].close()
    listeners[2].close()


def test_a_listener_is_open_or_closed() -> None:
    connected = threading.Event()
    listener = Listener("127.0.0.1")
    listener.on_connection(connected.set)
    member = Member(0, "127.0.0.1", listener.port, "a")
    assert not is_dead(member)
    assert connected.wait(10)
    store = listener.serve()
    assert store.port == listener.port
    assert not is_dead(member)
    other = Listener("127.0.0.1")
    other.close()
    assert is_dead(Member(1, "127.0.0.1", other.port, "b"))


def test_a_connection_that_only_breaks_is_opened_again(monkeypatch: pytest.MonkeyPatch) -> None:
    served = serve("127.0.0.1")
    opened: list[dist.Store] = []

    def reach(address: StoreAddress) -> dist.Store:
        opened.append(dist.TCPStore(address.host, address.port, is_master=False))
        return opened[-1]

    monkeypatch.setattr("lightning_replica.stores.shared.reach", reach)
    store = SharedStore(StoreAddress("127.0.0.1", served.port), lambda _: pytest.fail("it is not lost"))

    def breaks_once(connection: dist.Store) -> bytes:
        if len(opened) == 1:
            raise dist.DistNetworkError("reset by peer")
        return connection.get("a")

    served.set("a", "1")
    assert store._ask(breaks_once) == b"1"
    assert len(opened) == 2


@pytest.mark.parametrize("text", ["127.0.0.1:1", "[::1]:29500", "node7:29500/run/3"])
def test_addresses(text: str) -> None:
    assert str(parse(text)) == text
    for wrong in ("", "x", ":1", "host:", "host:x"):
        with pytest.raises(ValueError, match="HOST:PORT|invalid literal"):
            parse(wrong)
