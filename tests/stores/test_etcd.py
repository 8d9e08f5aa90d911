"""EtcdStore against a real etcd of three members; torch's TCPStore says what is right."""

import time
import uuid
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from multiprocessing.connection import Connection
from typing import Any

import pytest
import torch
import torch.distributed as dist
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from lightning_replica.errors import ConfigurationError
from lightning_replica.stores.address import EtcdAddress
from lightning_replica.stores.etcd import EtcdStore
from tests.stores.etcd_requests import SOON
from tests.support.etcd import LOOPBACK, NEEDS_ETCD
from tests.support.forked import context

pytestmark = NEEDS_ETCD


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
    reader, writer = context().Pipe(duplex=False)
    ranks = [context().Process(target=gloo, args=(rank, address, key(""), writer)) for rank in range(2)]
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
