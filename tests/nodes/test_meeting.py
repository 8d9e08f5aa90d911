"""Who is in, with a real store and threads that are nodes."""

import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from datetime import timedelta

import pytest
import torch.distributed as dist

from lightning_replica.control import keys
from lightning_replica.errors import ConfigurationError
from lightning_replica.nodes import meeting
from lightning_replica.nodes.listener import Listener
from lightning_replica.nodes.liveness import Heartbeat
from lightning_replica.nodes.meeting import join
from lightning_replica.nodes.membership import Member, register
from lightning_replica.nodes.node_settings import NodeSettings
from lightning_replica.nodes.placement import Placement
from lightning_replica.stores.address import StoreAddress
from lightning_replica.stores.tcp import connect, serve
from tests.support.ranks import free_port

HOST = "127.0.0.1"


def settings(nnodes: int, join_timeout_s: float = 60.0, node_timeout_s: float = 10.0) -> NodeSettings:
    return NodeSettings(
        nnodes, 1, StoreAddress(HOST, 1), "run", HOST, join_timeout_s=join_timeout_s, node_timeout_s=node_timeout_s
    )


@pytest.fixture
def listeners() -> Iterator[ExitStack]:
    with ExitStack() as stack:
        yield stack


def open_listener(listeners: ExitStack) -> Listener:
    listener = Listener(HOST)
    listeners.callback(listener.close)
    return listener


class Nodes:
    """Nodes that come at the same time, each with its own connection."""

    def __init__(self, store: dist.TCPStore, listeners: ExitStack) -> None:
        self._store, self._listeners = store, listeners
        self.found: dict[int, Placement] = {}
        self.names: dict[int, str] = {}

    def come(self, count: int, chosen: NodeSettings, names: Sequence[str] = ()) -> None:
        named = names or ["node"] * count
        threads = [threading.Thread(target=self._come, args=(chosen, name)) for name in named]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()

    def _come(self, chosen: NodeSettings, name: str) -> None:
        store = connect(HOST, self._store.port)
        member = register(store, HOST, open_listener(self._listeners).port, name)
        self.names[member.number] = name
        self.found[member.number] = join(store, member, chosen)


@pytest.mark.parametrize(("nnodes", "spares"), [(1, 0), (1, 2), (4, 0), (4, 3)])
def test_all_learn_the_same_placement(nnodes: int, spares: int, listeners: ExitStack) -> None:
    store = serve(HOST)
    nodes = Nodes(store, listeners)
    nodes.come(nnodes + spares, settings(nnodes))
    assert len(nodes.found) == nnodes + spares
    assert len(set(nodes.found.values())) == 1
    assert len(nodes.found[0].nodes) == nnodes
    assert store.get(keys.beat(0)).decode() == Heartbeat().to_json()  # as `heartbeats` expects


def test_ranks_follow_the_names_of_the_nodes(listeners: ExitStack) -> None:
    """A second run on the same nodes has the same ranks on each, in whatever order they come."""
    nodes = Nodes(serve(HOST), listeners)
    nodes.come(4, settings(4), ["gpu10", "gpu2", "gpu1", "cpu"])
    assert [nodes.names[number] for number in nodes.found[0].slots] == ["cpu", "gpu1", "gpu2", "gpu10"]


def test_a_node_that_has_died_is_not_counted(listeners: ExitStack) -> None:
    """Its machine refuses connections to its port: nobody waits for a time-out."""
    store = serve(HOST)
    listener = Listener(HOST)
    dead = register(store, HOST, listener.port, "dead")
    listener.close()
    nodes = Nodes(store, listeners)
    nodes.come(2, settings(2, node_timeout_s=1e6))
    assert nodes.found[1] == nodes.found[2]
    assert nodes.found[1].nodes == {1, 2}
    assert dead.number == 0


def test_a_node_that_falls_silent_is_not_counted(listeners: ExitStack) -> None:
    """Its port still accepts connections, as that of a process that a signal has stopped."""
    store = serve(HOST)
    register(store, HOST, open_listener(listeners).port, "silent")
    nodes = Nodes(store, listeners)
    nodes.come(2, settings(2, node_timeout_s=1.0))
    assert nodes.found[1] == nodes.found[2]
    assert nodes.found[1].nodes == {1, 2}


def test_a_stranger_that_writes_nonsense_holds_up_nobody(listeners: ExitStack) -> None:
    store = serve(HOST)
    store.add(keys.NODES_COME, 2)
    for number in range(2):
        store.set(keys.node(number), "nonsense")
        store.set(keys.beat(number), "nonsense")
    nodes = Nodes(store, listeners)
    nodes.come(2, settings(2))
    assert nodes.found[2].nodes == {2, 3}


def test_too_few_nodes(listeners: ExitStack) -> None:
    store = serve(HOST)
    member: Member = register(store, HOST, open_listener(listeners).port, "a")
    with pytest.raises(ConfigurationError, match=r"Only 1 of nnodes=2 nodes have come to 127.0.0.1:1 within 0.2 s"):
        join(store, member, settings(2, join_timeout_s=0.2))


def test_who_waits_says_for_whom(
    listeners: ExitStack, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    said: list[str] = []
    monkeypatch.setattr(meeting, "_FIRST_WORD_S", 0.0)
    monkeypatch.setattr(meeting, "say", said.append)
    store = serve(HOST)
    listener = Listener(HOST)
    register(store, HOST, listener.port, "dead")
    listener.close()
    own = register(store, HOST, open_listener(listeners).port, "first")
    other = register(store, HOST, open_listener(listeners).port, "second")
    meets = meeting._Meeting(store, own, settings(4))
    meets.look()
    meets._next_word = 0.0
    store.set(keys.beat(other.number), Heartbeat(-1).to_json())
    meets.look()
    assert said[1].startswith("waiting for 2 more of nnodes=4 nodes at 127.0.0.1:1, for up to ")
    assert said[1].endswith(" s. Here: first, second. 1 more have died while they waited.")


@pytest.mark.parametrize("signum", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_while_others_are_waited_for(signum: signal.Signals) -> None:
    port = free_port()
    line = ["run", "--nnodes", "2", "--rdzv-id", "job", "--rdzv-endpoint", f"{HOST}:{port}", "train.py"]
    process = subprocess.Popen([sys.executable, "-m", "lightning_replica", *line], start_new_session=True)
    try:
        store = connect(HOST, port)  # waits until it is served
        store.wait([f"job/1/{keys.beat(0)}"], timedelta(seconds=60))
        os.killpg(process.pid, signum)
        assert process.wait(30) == -signum
    finally:
        if process.poll() is None:
            process.kill()
