"""A store with tags: what strangers write counts for nothing, and everything else is as without tags."""

import threading
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st

from lightning_replica.errors import ConfigurationError
from lightning_replica.stores import tagged
from lightning_replica.stores.address import StoreAddress
from lightning_replica.stores.part import part_of
from lightning_replica.stores.reach import reach
from lightning_replica.stores.secret import FILE_VARIABLE, VARIABLE, name_of, own_secret
from lightning_replica.stores.tagged import TaggedStore, peek
from lightning_replica.stores.tcp import connect, serve

SECRET, OTHER = b"a secret of the job", b"a secret of another"


@pytest.fixture
def raw() -> Any:
    return serve("127.0.0.1")


@pytest.fixture
def told(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What the user is told."""
    said: list[str] = []
    monkeypatch.setattr(tagged, "warn", said.append)
    monkeypatch.setattr(tagged, "_reported", set())
    return said


def test_values_come_back_and_lie_there_with_tags(raw: Any, told: list[str]) -> None:
    store = TaggedStore(raw, SECRET)
    store.set("text", "1")
    store.set("bytes", b"\xff\x00")
    assert store.get("text") == b"1"
    assert store.multi_get(["bytes", "text"]) == [b"\xff\x00", b"1"]
    assert raw.get("text").endswith(b"1")
    assert len(raw.get("text")) == 25
    assert store.check(["text", "bytes"])
    assert not store.check(["text", "nothing"])
    assert store.add("count", 2) == store.add("count", 0) == 2
    assert not told


@pytest.mark.parametrize("stranger", [b"", b"1", b"x" * 30, TaggedStore(None, OTHER)._with_tag("key", "1")])  # type: ignore[arg-type]
def test_what_a_stranger_writes_counts_as_missing(stranger: bytes, raw: Any, told: list[str]) -> None:
    store = TaggedStore(raw, SECRET)
    raw.set("key", stranger)
    assert not store.check(["key"])
    assert store.compare_set("key", "1", "2") == b"1"  # torch's answer where there is no value
    assert store.compare_set("key", "", "mine") == b"mine"
    assert store.compare_set("key", "", "later") == b"mine"
    assert store.get("key") == b"mine"
    assert len(told) == 1
    assert "'key'" in told[0]


def test_a_value_that_was_moved_to_another_key_counts_as_missing(raw: Any, told: list[str]) -> None:
    store = TaggedStore(raw, SECRET)
    store.set("a", "bc")
    raw.set("b", raw.get("a"))
    raw.set("ab", raw.get("a")[:24] + b"c")
    assert not store.check(["b"])
    assert not store.check(["ab"])
    assert len(told) == 2


def test_a_part_of_a_store_has_the_same_tags(raw: Any, told: list[str]) -> None:
    whole = TaggedStore(raw, SECRET)
    part = part_of(whole, "run/1")
    part.set("key", "1")
    assert whole.get("run/1/key") == TaggedStore(part_of(raw, "run/1"), SECRET, "run/1").get("key") == b"1"
    assert not TaggedStore(part_of(raw, "run/1"), SECRET).check(["key"])
    assert part.multi_get(["key"]) == [b"1"]
    assert part.compare_set("key", "1", "2") == b"2"


def test_who_waits_goes_on_waiting_until_there_is_a_valid_value(raw: Any, told: list[str]) -> None:
    raw.set("key", "a stranger's")
    found: list[bytes] = []
    thread = threading.Thread(target=lambda: found.append(TaggedStore(raw.clone(), SECRET).get("key")))
    thread.start()
    while not told:
        thread.join(0.01)
    TaggedStore(raw.clone(), SECRET).set("key", "1")
    thread.join()
    assert found == [b"1"]


def test_who_does_not_wait_sees_that_a_value_was_written_over(raw: Any, told: list[str]) -> None:
    store = TaggedStore(raw, SECRET)
    store.set("a", "1")
    raw.set("b", "a stranger's")
    assert peek(store, ["a", "b"]) == [b"1", b""]
    assert peek(raw, ["b"]) == [b"a stranger's"]
    assert len(told) == 1


def test_a_wait_ends_in_time(raw: Any, told: list[str]) -> None:
    store = TaggedStore(raw, SECRET)
    raw.set("key", "a stranger's")
    for key in ("key", "nothing"):
        with pytest.raises(dist.DistStoreError):
            store.wait([key], timedelta(seconds=0.05))
    store.set("key", "1")
    store.wait(["key"], timedelta(seconds=10))


@given(st.lists(st.tuples(st.sampled_from(["set", "compare"]), st.sampled_from("ab"), st.text(max_size=3), st.text())))
def test_it_answers_as_a_store_without_tags(steps: list[tuple[str, str, str, str]]) -> None:
    plain, under = serve("127.0.0.1"), serve("127.0.0.1")
    store = TaggedStore(under, SECRET)
    for what, key, expected, value in steps:
        if what == "set":
            plain.set(key, value)
            store.set(key, value)
        else:
            assert store.compare_set(key, expected, value) == plain.compare_set(key, expected, value)
    for key in "ab":
        assert store.check([key]) == plain.check([key])
        assert not plain.check([key]) or store.get(key) == plain.get(key)


def test_connections_have_tags_if_the_process_has_a_secret(
    raw: Any, told: list[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv(VARIABLE, SECRET.decode())
    connect("127.0.0.1", raw.port).set("a", "1")
    monkeypatch.delenv(VARIABLE)
    (tmp_path / "secret").write_text(f"{SECRET.decode()}\n")
    monkeypatch.setenv(FILE_VARIABLE, str(tmp_path / "secret"))
    assert reach(StoreAddress("127.0.0.1", raw.port)).get("a") == b"1"
    monkeypatch.delenv(FILE_VARIABLE)
    assert connect("127.0.0.1", raw.port).get("a").endswith(b"1")
    assert not told


def test_a_secret_s_name_does_not_give_it_away() -> None:
    assert name_of(b"") == ""
    assert name_of(SECRET) != name_of(OTHER)
    assert SECRET.hex()[:8] not in name_of(SECRET)


def test_bad_secrets(tmp_path: Path) -> None:
    (tmp_path / "short").write_text("a b\n")
    (tmp_path / "binary").write_bytes(b"\xff" * 40)
    for environment, said in [
        ({VARIABLE: "x"}, f"{VARIABLE}: the secret has 1 characters, but needs 16 or more"),
        ({FILE_VARIABLE: str(tmp_path / "short")}, "the secret has 3 characters"),
        ({FILE_VARIABLE: str(tmp_path / "nowhere")}, "cannot be read: [Errno 2]"),
        ({FILE_VARIABLE: str(tmp_path / "binary")}, "cannot be read: 'utf-8'"),
        ({VARIABLE: "x" * 20, FILE_VARIABLE: "y"}, "are both set: set one of them only"),
    ]:
        with pytest.raises(ConfigurationError) as raised:
            own_secret(environment)
        assert said in str(raised.value)
    assert own_secret({}) == b""
