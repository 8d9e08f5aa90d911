"""EtcdStore against a real etcd of three members; torch's TCPStore says what is right."""

import secrets
import socket
import threading
import time
import uuid
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import contextmanager
from datetime import timedelta
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import pytest
import requests as http
import torch
import torch.distributed as dist
from etcd3gw import Etcd3Client
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from lightning_replica.errors import ConfigurationError
from lightning_replica.stores import etcd, etcd_members
from lightning_replica.stores.address import EtcdAddress
from lightning_replica.stores.etcd import EtcdStore
from lightning_replica.stores.etcd_members import EtcdMembers
from tests.support.etcd import LOOPBACK, NEEDS_ETCD, Member, identity, until
from tests.support.etcd import etcd as start_etcd
from tests.support.forked import _context

pytestmark = NEEDS_ETCD

SOON = timedelta(seconds=0.2)
REFUSED = EtcdAddress(((LOOPBACK, 1), (LOOPBACK, 2)))


@pytest.fixture(scope="module")
def members(tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[Member]]:
    with start_etcd(tmp_path_factory.mktemp("etcd")) as members:
        yield members


@pytest.fixture(scope="module")
def address(members: list[Member]) -> EtcdAddress:
    return EtcdAddress(tuple(member.endpoint for member in members))


@pytest.fixture
def key() -> Callable[[str], str]:
    """Names that no other test uses."""
    own = uuid.uuid4().hex
    return lambda name: f"{own}/{name}"


@pytest.fixture(params=["tcp", "etcd", "part of tcp", "part of etcd"])
def store(request: pytest.FixtureRequest, address: EtcdAddress) -> Iterator[dist.Store]:
    """A store, or a part of one, which torch calls from C++."""
    whole: dist.Store = EtcdStore(address) if "etcd" in request.param else served()
    yield dist.PrefixStore("part", whole) if "part" in request.param else whole
    del whole  # only now: torch does not keep it


def served() -> dist.Store:
    return dist.TCPStore(LOOPBACK, 0, is_master=True, wait_for_workers=False)


def test_values(store: dist.Store, key: Callable[[str], str]) -> None:
    a, b = key("a"), key("ü")
    assert not store.check([a])
    store.set(a, "1 ü")
    assert (store.get(a), store.check([a]), store.check([a, b])) == ("1 ü".encode(), True, False)
    store.set(a, b"\xff\x00")  # type: ignore[arg-type]
    store.set(b, "")
    assert store.multi_get([a, b, a]) == [b"\xff\x00", b"", b"\xff\x00"]
    assert store.check([a, b])
    assert (store.delete_key(a), store.delete_key(a), store.check([a])) == (True, False, False)
    assert (store.check([]), store.multi_get([])) == (True, [])
    store.set_timeout(SOON)
    store.wait([b])
    with pytest.raises(TypeError):
        store.set(a, 5)  # type: ignore[arg-type]


def test_compare_set(store: dist.Store, key: Callable[[str], str]) -> None:
    a, b = key("a"), key("b")
    assert store.compare_set(a, "x", "y") == b"x"
    assert not store.check([a])
    assert store.compare_set(a, "", "1") == b"1"
    assert store.compare_set(a, "", "2") == b"1"
    assert store.compare_set(a, "2", "3") == b"1"
    assert store.compare_set(a, "1", "3") == b"3"
    assert store.get(a) == b"3"
    assert store.compare_set(b, "", "") == b""
    assert store.check([b])
    assert store.compare_set(b, "", "4") == b"4"
    assert store.get(b) == b"4"


def test_counters(store: dist.Store, key: Callable[[str], str]) -> None:
    a = key("a")
    assert [store.add(a, each) for each in (0, 5, -7, 0, 2**40)] == [0, 5, -2, -2, 2**40 - 2]
    assert store.get(a) == str(2**40 - 2).encode()
    store.set(a, "41")
    assert store.add(a, 1) == 42
    store.delete_key(a)
    assert store.add(a, 3) == 3


def test_a_wait_that_times_out(store: dist.Store, key: Callable[[str], str]) -> None:
    store.set(key("there"), "")
    began = time.monotonic()
    with pytest.raises(dist.DistStoreError, match=key("missing")):
        store.wait([key("there"), key("missing")], SOON)
    assert 0.2 <= time.monotonic() - began < 2
    with pytest.raises(dist.DistStoreError, match=key("missing")):
        store.wait([key("missing")], timedelta(milliseconds=1))  # before any answer comes


def test_what_is_no_number_is_no_counter(address: EtcdAddress, key: Callable[[str], str]) -> None:
    store = EtcdStore(address)
    store.set(key("a"), "x")
    with pytest.raises(dist.DistStoreError, match="no counter: its value is b'x'"):
        store.add(key("a"), 1)


KEYS, VALUES = st.sampled_from("ab"), st.sampled_from(["", "1", "2"])
STEPS = st.lists(
    st.one_of(
        st.tuples(st.just("set"), KEYS, VALUES),
        st.tuples(st.just("compare_set"), KEYS, VALUES, VALUES),
        st.tuples(st.just("add"), st.just("n"), st.integers(-2, 2)),
        st.tuples(st.just("check"), st.lists(st.sampled_from("abn"), max_size=3)),
        st.tuples(st.just("delete_key"), st.sampled_from("abn")),
    ),
    max_size=20,
)


@settings(max_examples=20, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(steps=STEPS)
def test_any_steps(address: EtcdAddress, steps: list[tuple[Any, ...]]) -> None:
    """Two connections take turns, so what one knows of the store is old."""
    own = uuid.uuid4().hex
    whole = [served(), EtcdStore(address), EtcdStore(address)]
    right, *ours = (dist.PrefixStore(own, each) for each in whole)
    for turn, (name, *arguments) in enumerate(steps):
        expected, found = (getattr(each, name)(*arguments) for each in (right, ours[turn % 2]))
        assert found == expected, (name, arguments)
    there = [each for each in "abn" if right.check([each])]
    assert ours[0].multi_get(there) == right.multi_get(there)


def together(count: int, work: Callable[[int], Any]) -> list[Any]:
    with ThreadPoolExecutor(count) as pool:
        return list(pool.map(work, range(count)))


def test_counting_at_once(address: EtcdAddress, key: Callable[[str], str]) -> None:
    def count(_: int) -> list[int]:
        store = EtcdStore(address)
        return [store.add(key("a"), 1) for _ in range(15)]

    assert sorted(sum(together(4, count), [])) == list(range(1, 61))


def test_only_one_wins(address: EtcdAddress, key: Callable[[str], str]) -> None:
    names = [key(str(number)) for number in range(15)]

    def run(number: int) -> list[bytes]:
        store = EtcdStore(address)
        return [store.compare_set(name, "", f"{number}") for name in names]

    results = together(4, run)
    assert results == [EtcdStore(address).multi_get(names)] * 4


def refusal(status: int, text: str) -> http.HTTPError:
    response = http.Response()
    response.status_code, response._content = status, text.encode()
    return http.HTTPError(f"{status} {text}", response=response)


class Requests:
    """Counts requests, and can break one of them."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.sent: list[dict[str, Any]] = []
        self.watches = 0
        self.lost = 0  # so many answers get lost
        self.refusals: list[tuple[int, str]] = []  # what comes instead of the next answers
        self.after: Callable[[], Any] | None = None  # called once, after the next request
        self.before_watch: Callable[[], None] = lambda: None
        self._transaction, self._watch = Etcd3Client.transaction, EtcdMembers.watch
        requests = self

        def transaction(client: Any, wishes: dict[str, Any]) -> Any:
            requests.sent.append(wishes)
            if requests.refusals:
                raise refusal(*requests.refusals.pop())
            answer = requests._transaction(client, wishes)
            if requests.lost:
                requests.lost -= 1
                raise http.ConnectionError("lost")
            after, requests.after = requests.after, None
            if after is not None:
                after()
            return answer

        def watch(self: EtcdMembers, *arguments: Any) -> None:
            requests.watches += 1
            requests.before_watch()
            requests._watch(self, *arguments)

        monkeypatch.setattr(Etcd3Client, "transaction", transaction)
        monkeypatch.setattr(EtcdMembers, "watch", watch)


@pytest.fixture
def requests(monkeypatch: pytest.MonkeyPatch) -> Requests:
    return Requests(monkeypatch)


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


@contextmanager
def elsewhere(work: Callable[[], Any]) -> Iterator["Future[Any]"]:
    """Does something in another thread, which must end soon after the block."""
    with ThreadPoolExecutor(1) as pool:
        future = pool.submit(work)
        yield future
        future.result(timeout=20)


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


def test_what_the_environment_says_does_not_count(
    address: EtcdAddress, key: Callable[[str], str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("http_proxy", f"http://{LOOPBACK}:1")
    assert EtcdStore(address).add(key("a"), 1) == 1


def gloo(rank: int, address: EtcdAddress, prefix: str, writer: Connection) -> None:
    whole = EtcdStore(address)
    dist.init_process_group("gloo", store=dist.PrefixStore(prefix, whole), rank=rank, world_size=2)
    tensor = torch.tensor([rank + 1.0])
    dist.all_reduce(tensor)
    second = dist.new_group([0, 1])
    dist.barrier(second)
    writer.send(tensor.item())
    dist.destroy_process_group()


def test_process_groups(address: EtcdAddress, key: Callable[[str], str]) -> None:
    reader, writer = _context().Pipe(duplex=False)
    ranks = [_context().Process(target=gloo, args=(rank, address, key(""), writer)) for rank in range(2)]
    for process in ranks:
        process.start()
    try:
        for process in ranks:
            process.join(60)
        assert [process.exitcode for process in ranks] == [0, 0]
        assert [reader.recv(), reader.recv()] == [3.0, 3.0]
    finally:
        for process in ranks:
            process.kill()
            process.join()
        reader.close()
        writer.close()


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (((),), r"endpoints=\(\) must name each member of etcd once"),
        (((("a", 1), ("a", 1)),), "must name each member of etcd once"),
        (((("a", 0),),), "port=0 must be a whole number, 1 or more"),
        (((("", 1),),), r"\('', 1\) in endpoints must be a host and a port up to 65535"),
        (((("a", 70000),),), r"\('a', 70000\) in endpoints must be a host and a port up to 65535"),
        (((("a", 1),), "nowhere.pem"), "ca_cert='nowhere.pem' must be a PEM file, but there is no such file"),
        (((("a", 1),), __file__, __file__), "and key=None belong together: give both, or neither"),
        (((("a", 1),), None, __file__, __file__), "is used with TLS only: give ca_cert as well"),
    ],
)
def test_addresses_that_make_no_sense(arguments: tuple[Any, ...], says: str) -> None:
    with pytest.raises(ConfigurationError, match=says):
        EtcdAddress(*arguments)


def test_what_a_run_has_left_is_forgotten(address: EtcdAddress, key: Callable[[str], str]) -> None:
    store = EtcdStore(address)
    for name in ("run/1/a", "run/1/b/c", "run/10/a", "run/1", "run/0/z"):
        store.set(key(name), "x")
    store.forget(key("run/1/"))
    assert [store.check([key(name)]) for name in ("run/1/a", "run/1/b/c")] == [False, False]
    assert store.check([key("run/10/a"), key("run/1"), key("run/0/z")])
