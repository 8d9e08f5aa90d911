"""EtcdStore asks no more often than it must, and requests that are lost, late or refused do no harm."""

import threading
import time
from collections.abc import Callable
from concurrent.futures import wait
from typing import Any

import pytest
import torch.distributed as dist

from lightning_replica.stores import etcd, etcd_members
from lightning_replica.stores.address import EtcdAddress
from lightning_replica.stores.etcd import EtcdStore
from tests.stores.etcd_requests import SOON, Requests, elsewhere
from tests.support.etcd import NEEDS_ETCD, until

pytestmark = NEEDS_ETCD


def test_round_trips(address: EtcdAddress, key: Callable[[str], str], requests: Requests) -> None:
    store, names = EtcdStore(address), [key(str(number)) for number in range(300)]
    for name in names:
        store.set(name, name)
    for ask in (store.check, store.multi_get):
        for count, expected in ((1, 1), (128, 1), (129, 2), (300, 3)):
            requests.sent.clear()
            assert ask(names[:count]) in (True, [name.encode() for name in names[:count]])
            assert len(requests.sent) == expected
    assert requests.watches == 0


def test_a_wait_ends_with_the_last_value(address: EtcdAddress, key: Callable[[str], str], requests: Requests) -> None:
    store, other, names = EtcdStore(address), EtcdStore(address), [key(str(number)) for number in range(200)]
    for name in names[3:]:
        store.set(name, name)
    with elsewhere(lambda: other.multi_get(names)) as found:
        until(lambda: requests.watches == 1, "it waits")
        for name in names[:2]:
            store.set(name, name)
        assert not wait([found], timeout=0.3).done
        requests.sent.clear()
        store.set(names[2], names[2])
        assert found.result(timeout=2) == [name.encode() for name in names]
    assert (requests.watches, len(requests.sent)) == (1, 3)  # it has not polled: the `set`, and two to read all values


def test_a_value_that_comes_before_the_watch(
    address: EtcdAddress, key: Callable[[str], str], requests: Requests
) -> None:
    store, other = EtcdStore(address), EtcdStore(address)
    requests.before_watch = lambda: other.set(key("a"), "x")
    began = time.monotonic()
    assert store.get(key("a")) == b"x"
    assert time.monotonic() - began < etcd._WATCH_S / 2


def test_a_wait_survives_that_etcd_forgets(address: EtcdAddress, key: Callable[[str], str], requests: Requests) -> None:
    store, other = EtcdStore(address), EtcdStore(address)

    def compact() -> None:
        if requests.watches == 1:
            other.set(key("b"), "")
            other.set(key("b"), "")
            other._members.ask(
                lambda client: client.post(client.get_url("/kv/compaction"), json={"revision": other._revision})
            )
        else:
            other.set(key("a"), "x")

    requests.before_watch = compact
    began = time.monotonic()
    assert store.get(key("a")) == b"x"
    assert time.monotonic() - began < etcd._WATCH_S / 2
    assert requests.watches == 2


def test_news_of_other_keys_do_not_prolong_a_wait(
    address: EtcdAddress, key: Callable[[str], str], requests: Requests
) -> None:
    store, other = EtcdStore(address), EtcdStore(address)
    begun, ended = threading.Event(), threading.Event()
    requests.before_watch = begun.set

    def come_and_go() -> None:
        begun.wait(10)
        while not ended.is_set():
            other.set(key("a"), "")
            other.delete_key(key("a"))

    with elsewhere(come_and_go):
        began = time.monotonic()
        with pytest.raises(dist.DistStoreError, match=key("missing")):
            store.wait([key("a"), key("missing")], SOON)
        ended.set()
    assert time.monotonic() - began < 2


def test_answers_that_get_lost(address: EtcdAddress, key: Callable[[str], str], requests: Requests) -> None:
    """The request is carried out twice, mostly as if it were once."""
    store, a, b = EtcdStore(address), key("a"), key("b")

    def lose(ask: Callable[..., Any], *arguments: Any) -> Any:
        requests.lost = 1
        answer = ask(*arguments)
        assert requests.lost == 0
        return answer

    lose(store.set, a, "x")
    assert lose(store.get, a) == b"x"
    assert lose(store.compare_set, b, "", "1") == b"1"
    store.compare_set(b, "1", "2")
    requests.sent.clear()
    assert lose(store.compare_set, b, "9", "3") == b"2"
    assert store.get(b) == b"2"
    assert lose(store.add, key("n"), 1) == 2  # as TCPStore when it is asked again
    requests.after = lambda: setattr(requests, "lost", 1)  # the second request
    assert not store.delete_key(b)  # likewise
    assert (requests.lost, store.check([b])) == (0, False)


def test_what_others_do_meanwhile(address: EtcdAddress, key: Callable[[str], str], requests: Requests) -> None:
    """Between the two requests of one method."""
    store, other, a = EtcdStore(address), EtcdStore(address), key("a")

    def after(first: Callable[[], Any], ask: Callable[..., Any], *arguments: Any) -> Any:
        requests.after = first
        answer = ask(*arguments)
        assert requests.after is None
        return answer

    store.set(a, "5")
    assert after(lambda: other.set(a, "6"), store.add, a, 1) == 7
    assert after(lambda: other.delete_key(a), store.add, a, 1) == 1
    assert after(lambda: other.set(a, "8"), store.compare_set, a, "1", "2") == b"8"
    assert after(lambda: other.delete_key(a), store.compare_set, a, "8", "2") == b"8"
    assert not store.check([a])
    store.set(a, "")
    assert after(lambda: other.delete_key(a), store.compare_set, a, "", "2") == b"2"
    assert store.get(a) == b"2"
    assert after(lambda: other.set(a, "3"), store.delete_key, a)
    store.set(a, "4")
    assert not after(lambda: other.delete_key(a), store.delete_key, a)


@pytest.mark.parametrize("what", [(503, "no leader"), (500, "leader changed"), (429, "too many requests")])
def test_members_that_cannot_answer_now(
    what: tuple[int, str],
    address: EtcdAddress,
    key: Callable[[str], str],
    requests: Requests,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    store = EtcdStore(address)
    requests.refusals = [what] * 4
    store.set(key("a"), "x")
    assert len(requests.sent) == 5
    monkeypatch.setattr(etcd_members, "_ELECTION_S", 0.2)
    requests.refusals = [what] * 1000
    with pytest.raises(dist.DistNetworkError, match=what[1]):
        store.get(key("a"))


def test_a_request_that_arrives_late(address: EtcdAddress, key: Callable[[str], str], requests: Requests) -> None:
    """A member that was stopped carries out what has long been done by another."""
    store, other, names = EtcdStore(address), EtcdStore(address), [key(name) for name in "abcd"]
    a, b, c, d = names
    store.set(d, "old")
    requests.sent.clear()
    store.set(a, "old")
    store.compare_set(b, "", "old")
    store.add(c, 1)
    store.delete_key(d)
    late = list(requests.sent)
    for name in names:
        other.set(name, "7")
    for wishes in late:
        other._members.transact(wishes)
    assert other.multi_get(names) == [b"7"] * 4


@pytest.mark.parametrize(("size", "says"), [(1.6, "too large"), (3, "larger than max")])
def test_what_etcd_refuses(
    size: float, says: str, address: EtcdAddress, key: Callable[[str], str], requests: Requests
) -> None:
    with pytest.raises(dist.DistStoreError, match=f"etcd refuses a request: .*{says}"):
        EtcdStore(address).set(key("a"), bytes(int(size * 2**20)))
    assert len(requests.sent) == 1
