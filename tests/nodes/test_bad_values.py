"""Values in the store that no process of the package has written: each is named, and ends nobody."""

from collections.abc import Callable
from typing import Any

import pytest

from lightning_replica.control import keys, untrusted
from lightning_replica.control.faults import Fault
from lightning_replica.control.gathering import Gathering
from lightning_replica.control.generation import Generations
from lightning_replica.errors import ConfigurationError, ProtocolError
from lightning_replica.nodes.membership import come, first_placement, register
from lightning_replica.stores.tcp import serve
from tests.nodes.test_cluster import Node, know, make

__all__ = ["make"]  # a fixture

BAD = [
    b"",
    b"x",
    b"\xff\xfe",
    b"[]",
    b"null",
    b"7",
    b'{"a": 1}',
    b"[" * 3000,
    b'["death", ["a"], "b", "", ""]',
    b"[1e999, 0]",
]


@pytest.fixture
def told(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    said: list[str] = []
    monkeypatch.setattr(untrusted, "warn", said.append)
    monkeypatch.setattr(untrusted, "_reported", set())
    return said


@pytest.mark.parametrize("bad", BAD)
def test_an_entry_of_the_log(bad: bytes, told: list[str]) -> None:
    store = serve("127.0.0.1")
    store.set(keys.generation(1), bad)  # type: ignore[arg-type]
    generations = Generations(store)
    assert generations.newest(0) == 1
    assert generations.fault(1).detected == "peer gone"
    assert generations.fault_and_note(1)[1] == ""
    assert len(told) == 1
    assert "'generation/1'" in told[0]
    assert generations.begin_next(1, Fault("exception", (1,), "x")) == 2


@pytest.mark.parametrize(
    "bad", [*BAD, b'["death", [0], "x", "", "[[0, 1, 2], []]"]', b'["death", [0], "x", "", "what?"]']
)
def test_a_cluster_reads_on(bad: bytes, make: Callable[..., Node], told: list[str]) -> None:
    """A log with a bad entry, heartbeats, and a node that is none: a node that is lost is found all the same."""
    a, b = make("a"), make("b")
    know(a, b, count=1)
    c = make("c")
    know(a, count=2)
    store: Any = a.store  # torch's annotation leaves out bytes
    store.set(keys.node(3), bad)
    store.set(keys.NODES_COME, "4")
    store.set(keys.beat(1), bad)
    store.set(keys.beat(2), bad)
    store.set(keys.generation(1), bad)
    a.until(lambda: a.cluster._known == 1)
    b.die()
    a.cluster.heartbeats.probe_now()
    a.until(lambda: bool(a.heard))
    assert a.heard == [((2, 3), "Node b, with ranks [2, 3], is lost", "node c")]
    c.until(lambda: bool(c.heard))
    assert c.heard == [("start", (2, 3), 2)]
    assert any(f"'{keys.generation(1)}'" in each for each in told)


@pytest.mark.parametrize("bad", BAD)
def test_the_first_placement(bad: bytes) -> None:
    store = serve("127.0.0.1")
    store.set(keys.NODES_FIRST, bad)  # type: ignore[arg-type]
    with pytest.raises(ConfigurationError, match="the key 'nodes/first' in the store .* Start the run with a secret"):
        first_placement(store)


def test_a_counter_that_was_set_back_gives_no_node_s_number_again() -> None:
    store = serve("127.0.0.1")
    first = register(store, "127.0.0.1", 1, "a")
    store.set(keys.NODES_COME, "0")
    assert register(store, "127.0.0.1", 1, "b").number == 1
    assert first.number == 0
    store.set(keys.NODES_COME, str(2**62))
    assert come(store) == 100_000


@pytest.mark.parametrize("bad", [*BAD, b"[[1]]"])
def test_what_ranks_have_posted(bad: bytes) -> None:
    """The recovery begins again, in another generation: the others hear of it too."""
    store = serve("127.0.0.1")

    def conclude(parts: list[dict[str, Any]]) -> Any:
        return len(parts)

    one, other = Gathering(store), Gathering(store)
    one.give("topic", 0, {}, range(2), conclude)
    store.set(keys.posted("topic", 0), bad)  # type: ignore[arg-type]
    other.give("topic", 1, {}, range(2), conclude)
    if bad == b"[]":
        assert one.result("topic") == 1  # no part is a part that lacks, which the conclusion has to find
        return
    for each in (one, other):
        with pytest.raises(ProtocolError, match="'topic/posted/0' in the store is of a stranger"):
            each.result("topic")


@pytest.mark.parametrize(
    "bad", [b"", b"x", b"\xff", b"[]", b"null", b"7", b'{"error": 7}', b'{"error": ["a", "b", "c"]}']
)
def test_a_result(bad: bytes) -> None:
    store = serve("127.0.0.1")
    store.set(keys.result("topic"), bad)  # type: ignore[arg-type]
    with pytest.raises(ProtocolError, match="'topic/result' in the store is of a stranger"):
        Gathering(store).result("topic")
