"""A store outlives runs: a job that is started again finds nothing of the one before."""

import signal
import subprocess
import sys
import threading
from dataclasses import replace
from typing import Any

import pytest
import torch.distributed as dist

from lightning_replica.control import keys
from lightning_replica.nodes import attempt
from lightning_replica.nodes.liveness import Heartbeat
from lightning_replica.nodes.membership import register
from lightning_replica.nodes.node_settings import NodeSettings
from lightning_replica.nodes.placement import Placement
from lightning_replica.stores.address import StoreAddress
from lightning_replica.stores.reach import reach
from lightning_replica.stores.tcp import connect, serve
from tests.support.ranks import free_port

SETTINGS = NodeSettings(2, 1, StoreAddress("127.0.0.1", 1), "run", "127.0.0.1", node_timeout_s=0.4)


@pytest.fixture
def store() -> Any:
    return serve("127.0.0.1")


def part(store: Any, prefix: str) -> dist.Store:
    return dist.PrefixStore(prefix, store)


def begin(store: Any, prefix: str) -> dist.Store:
    """Two nodes come and get their ranks."""
    own = part(store, prefix)
    for name in "ab":
        register(own, "127.0.0.1", 1, name)
    own.set(keys.NODES_FIRST, Placement((0, 1)).to_json())
    return own


def test_all_nodes_enter_the_same_attempt_and_another_run_has_its_own(store: Any) -> None:
    assert [attempt.enter(store, SETTINGS) for _ in range(2)] == ["run/1"] * 2
    assert attempt.enter(store, replace(SETTINGS, run_id="other")) == "other/1"


def test_after_an_attempt_is_over_comes_the_next(store: Any) -> None:
    attempt.close(part(store, attempt.enter(store, SETTINGS)))
    found: list[str] = []

    def enter() -> None:
        found.append(attempt.enter(connect("127.0.0.1", store.port), SETTINGS))

    threads = [threading.Thread(target=enter) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == ["run/2"] * 8


def test_an_attempt_whose_nodes_are_all_dead_is_over(store: Any) -> None:
    begin(store, attempt.enter(store, SETTINGS))
    assert attempt.enter(store, SETTINGS) == "run/2"


def test_an_attempt_with_a_live_node_goes_on(store: Any) -> None:
    own = begin(store, attempt.enter(store, SETTINGS))
    stopped = threading.Event()

    def live() -> None:
        count = 1
        while not stopped.wait(0.01):
            count += 1
            own.set(keys.beat(1), Heartbeat(count).to_json())

    thread = threading.Thread(target=live)
    thread.start()
    assert attempt.enter(connect("127.0.0.1", store.port), SETTINGS) == "run/1"
    stopped.set()
    thread.join()


def test_the_command_serves_a_store_until_a_signal() -> None:
    port = free_port()
    command = [sys.executable, "-m", "lightning_replica", "store", f"127.0.0.1:{port}"]
    with subprocess.Popen(command, stderr=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stderr is not None
        assert process.stderr.readline() == f"replica_zero: serves a store at 127.0.0.1:{port}.\n"
        assert attempt.enter(reach(StoreAddress("127.0.0.1", port)), SETTINGS) == "run/1"
        second = subprocess.run(command, capture_output=True, text=True, check=False)
        assert second.returncode == 2
        assert f"Cannot serve a store at 127.0.0.1:{port}: " in second.stderr
        process.send_signal(signal.SIGTERM)
        assert process.stderr.readline() == "replica_zero: SIGTERM: the store ends.\n"
    assert process.returncode == 0
