"""EtcdStore loses nothing when members of etcd die, fall silent or are slow, and trusts only those that it should."""

import secrets
import socket
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

from lightning_replica.stores import etcd, etcd_members
from lightning_replica.stores.address import EtcdAddress
from lightning_replica.stores.etcd import EtcdStore
from tests.stores.etcd_requests import SOON, Requests, elsewhere
from tests.support.etcd import LOOPBACK, NEEDS_ETCD, Member, identity, until
from tests.support.etcd import etcd as start_etcd

pytestmark = NEEDS_ETCD

REFUSED = EtcdAddress(((LOOPBACK, 1), (LOOPBACK, 2)))


@pytest.mark.parametrize("ask", ["get", "add", "set", "wait", "check"])
def test_nobody_answers(ask: str) -> None:
    store = EtcdStore(REFUSED)
    arguments: dict[str, tuple[Any, ...]] = {"get": ("a",), "add": ("a", 1), "set": ("a", "b")}
    began = time.monotonic()
    with pytest.raises(dist.DistNetworkError, match=r"No member of etcd answers: .*:[12]: .*; .*:[12]: .*refused"):
        getattr(store, ask)(*arguments.get(ask, (["a"],)))
    assert time.monotonic() - began < 1


class Worker:
    """Uses a store without a pause, and checks each answer."""

    def __init__(self, address: EtcdAddress, name: str) -> None:
        self._store, self._name = EtcdStore(address), name
        self.done, self.ended = 0, threading.Event()

    def run(self) -> None:
        while not self.ended.is_set():
            old, new = (str(number) if number else "" for number in (self.done, self.done + 1))
            assert self._store.compare_set(f"{self._name}/state", old, new) == new.encode()
            self._store.set(f"{self._name}/{new}", new)
            assert self._store.multi_get([f"{self._name}/{new}", f"{self._name}/state"]) == [new.encode()] * 2
            assert self._store.check([f"{self._name}/{new}"])
            self.done += 1


@contextmanager
def at_work(address: EtcdAddress, name: str) -> Iterator[Callable[[], None]]:
    """Workers that must not fail in the block, nor lose anything. Yields what waits until each has done more."""
    workers = [Worker(address, f"{name}{number}") for number in range(3)]
    with ThreadPoolExecutor(3) as pool:
        futures = [pool.submit(worker.run) for worker in workers]

        def go_on() -> None:
            wanted = [worker.done + 3 for worker in workers]
            until(
                lambda: (
                    any(future.done() for future in futures)
                    or all(worker.done >= least for worker, least in zip(workers, wanted, strict=True))
                ),
                "all workers go on",
            )
            assert not [future.result() for future in futures if future.done()]

        try:
            yield go_on
        finally:
            for worker in workers:
                worker.ended.set()
        for future in futures:
            future.result()
    store = EtcdStore(address)
    for worker in workers:
        written = [f"{worker._name}/{number}" for number in range(1, worker.done + 1)]
        assert store.multi_get(written) == [str(number).encode() for number in range(1, worker.done + 1)]


def test_each_member_dies_once(address: EtcdAddress, members: list[Member], key: Callable[[str], str]) -> None:
    with at_work(address, key("")) as go_on:
        go_on()
        for member in members:
            member.kill()
            go_on()
            member.restart()


def test_each_member_is_silent_once(
    address: EtcdAddress, members: list[Member], key: Callable[[str], str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(etcd_members, "_ANSWER_S", 1.0)
    with at_work(address, key("")) as go_on:
        for member in members:
            member.stop()
            try:
                go_on()
            finally:
                member.go_on()
            member.await_health()


@pytest.mark.parametrize("loss", ["kill", "stop"])
def test_a_wait_goes_on_elsewhere(
    loss: str,
    address: EtcdAddress,
    members: list[Member],
    key: Callable[[str], str],
    requests: Requests,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(etcd, "_WATCH_S", 0.5)
    monkeypatch.setattr(etcd_members, "_ANSWER_S", 1.0)
    store, other = EtcdStore(address), EtcdStore(address)
    with elsewhere(lambda: store.get(key("a"))) as found:
        until(lambda: requests.watches > 0, "it waits")
        host, port = store._members._clients[0].host, store._members._clients[0].port
        member = next(each for each in members if each.endpoint == (host, port))
        getattr(member, loss)()
        try:
            other.set(key("a"), "x")
            assert found.result(timeout=10) == b"x"
        finally:
            member.restart() if loss == "kill" else member.go_on()
    member.await_health()


def test_the_majority_is_lost_for_a_while(
    address: EtcdAddress, members: list[Member], key: Callable[[str], str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(etcd_members, "_ANSWER_S", 1.0)
    monkeypatch.setattr(etcd_members, "_ELECTION_S", 1.0)
    store = EtcdStore(address)
    store.set(key("a"), "1")
    for member in members[1:]:
        member.kill()
    try:
        with pytest.raises(dist.DistNetworkError, match="No member of etcd answers"):
            store.get(key("a"))
        with pytest.raises(dist.DistNetworkError, match="No member of etcd answers"):
            store.set(key("a"), "2")
    finally:
        for member in members[1:]:
            member.start()
        for member in members:
            member.await_health()
    assert store.get(key("a")) in (b"1", b"2")  # nobody knows whether it was done
    store.set(key("a"), "3")
    assert store.get(key("a")) == b"3"


def test_tls(tmp_path: Path) -> None:
    right, wrong = identity(tmp_path, "right"), identity(tmp_path, "wrong")
    with start_etcd(tmp_path, 1, right) as (member,):
        store = EtcdStore(EtcdAddress((member.endpoint,), right.ca_cert, right.cert, right.key))
        store.set("a", "b")
        assert store.get("a") == b"b"
        with pytest.raises(dist.DistStoreError):
            store.wait(["c"], SOON)
        stranger = EtcdStore(EtcdAddress((member.endpoint,), right.ca_cert, wrong.cert, wrong.key))
        with pytest.raises(dist.DistNetworkError):
            stranger.get("a")
        deceived = EtcdStore(EtcdAddress((member.endpoint,), wrong.ca_cert, right.cert, right.key))
        with pytest.raises(dist.DistNetworkError, match="CERTIFICATE_VERIFY_FAILED"):
            deceived.get("a")
        with pytest.raises(dist.DistNetworkError, match="give it `ca_cert`"):
            EtcdStore(EtcdAddress((member.endpoint,))).get("a")


def test_a_silent_member_is_asked_once(
    address: EtcdAddress, key: Callable[[str], str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(etcd_members, "_ANSWER_S", 0.5)
    monkeypatch.setattr(secrets, "randbelow", lambda _: 0)  # begins with the first member
    with socket.create_server((LOOPBACK, 0)) as silent:
        store = EtcdStore(EtcdAddress((silent.getsockname()[:2], *address.endpoints)))
        began = time.monotonic()
        for number in range(30):
            store.set(key("a"), str(number))
    assert time.monotonic() - began < 5


def test_members_that_are_slow_are_not_lost(
    address: EtcdAddress, members: list[Member], key: Callable[[str], str], requests: Requests
) -> None:
    """A short wait is over before they answer, and before they would count as silent."""

    def wake() -> None:
        for member in members:
            member.go_on()

    timer = threading.Timer(5 * SOON.total_seconds(), wake)

    def stop() -> None:
        for member in members:
            member.stop()
        timer.start()

    requests.before_watch = stop
    store = EtcdStore(address)
    try:
        with pytest.raises(dist.DistStoreError, match=key("a")):
            store.wait([key("a")], SOON)
    finally:
        timer.join()
    for member in members:
        member.await_health()
