"""Gatherings by node, in threads that stand for ranks, with real stores."""

import random
import threading
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest

from lightning_replica.control import keys
from lightning_replica.control.gathering import Gathering, LocalRanks
from lightning_replica.errors import ConfigurationError, Interrupted, ProtocolError, RecoveryError
from lightning_replica.stores.interface import Store
from lightning_replica.stores.tcp import connect, serve

LOOPBACK = "127.0.0.1"
SIZE = 3  # ranks of a node


class Counting:
    """A store that counts its messages."""

    def __init__(self, store: Store, counts: Counter[str]) -> None:
        self._store, self._counts = store, counts

    def __getattr__(self, name: str) -> Any:
        self._counts[name] += 1
        return getattr(self._store, name)


class Nodes:
    """A store of the run and one for each node."""

    def __init__(self, nodes: int) -> None:
        self.run, self.near = serve(LOOPBACK), [serve(LOOPBACK) for _ in range(nodes)]
        self.counts: Counter[str] = Counter()
        self.ranks = range(nodes * SIZE)

    def open_run(self) -> Any:
        return Counting(connect(LOOPBACK, self.run.port), self.counts)

    def gathering(self, rank: int) -> Gathering:
        port = self.near[rank // SIZE].port

        def both() -> tuple[Store, Store]:
            return self.open_run(), connect(LOOPBACK, port)

        return Gathering(self.open_run(), LocalRanks(connect(LOOPBACK, port), SIZE, both))

    def all(self, work: Callable[[int, Gathering], Any]) -> dict[int, Any]:
        """Call ``work`` in a thread of each rank; return the results, or the errors."""
        results: dict[int, Any] = {}

        def run(rank: int) -> None:
            gathering = self.gathering(rank)
            try:
                results[rank] = work(rank, gathering)
            except Exception as error:
                results[rank] = error
            finally:
                gathering.close()

        threads = [threading.Thread(target=run, args=(rank,)) for rank in self.ranks]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(30)
        return results


@pytest.fixture
def nodes() -> Nodes:
    return Nodes(3)


def numbers(parts: list[dict[str, Any]]) -> list[int]:
    return [part["rank"] for part in parts]


def test_all_ranks_read_one_conclusion_from_all_parts_in_order(nodes: Nodes) -> None:
    drawn: list[int] = []

    def conclude(parts: list[dict[str, Any]]) -> list[int]:
        drawn.append(1)
        return numbers(parts)

    def work(rank: int, gathering: Gathering) -> Any:
        gathering.give("topic", rank, {"rank": rank}, nodes.ranks, conclude)
        return gathering.result("topic")

    assert nodes.all(work) == dict.fromkeys(nodes.ranks, list(nodes.ranks))
    assert len(drawn) == 1


def test_the_store_of_the_run_gets_a_few_messages_from_each_node(nodes: Nodes) -> None:
    def work(rank: int, gathering: Gathering) -> Any:
        gathering.give("topic", rank, {"rank": rank}, nodes.ranks, numbers)
        return gathering.result("topic")

    nodes.all(work)
    assert nodes.counts == {"set": 3, "add": 3, "multi_get": 1, "compare_set": 1, "get": 3}


def test_some_ranks_only(nodes: Nodes) -> None:
    members = [1, 3, 4]

    def work(rank: int, gathering: Gathering) -> Any:
        if rank not in members:
            return None
        gathering.give("topic", rank, {"rank": rank}, members, numbers)
        return gathering.result("topic")

    assert [result for result in nodes.all(work).values() if result] == [members] * 3


@pytest.mark.parametrize("error", [RecoveryError, ConfigurationError, ProtocolError])
def test_an_error_of_the_conclusion_is_everyones(nodes: Nodes, error: type[Exception]) -> None:
    def conclude(parts: list[dict[str, Any]]) -> None:
        raise error("what is wrong")

    def work(rank: int, gathering: Gathering) -> Any:
        gathering.give("topic", rank, {}, nodes.ranks, conclude)
        return gathering.result("topic")

    results = nodes.all(work)
    assert len(results) == len(nodes.ranks)
    assert all(type(each) is error and str(each) == "what is wrong" for each in results.values())


def test_a_bug_in_the_conclusion_keeps_nobody_waiting(nodes: Nodes) -> None:
    def conclude(parts: list[dict[str, Any]]) -> None:
        raise KeyError("bug")

    def work(rank: int, gathering: Gathering) -> Any:
        gathering.give("topic", rank, {}, nodes.ranks, conclude)
        return gathering.result("topic")

    types = Counter(type(each) for each in nodes.all(work).values())
    assert types == {KeyError: 1, RecoveryError: len(nodes.ranks) - 1}


@pytest.mark.parametrize("seed", range(5))
def test_either_all_have_the_conclusion_or_none_has(nodes: Nodes, seed: int) -> None:
    """A rank that is called away at a random moment decides with the others in one write."""
    leaves = random.Random(seed).choice(nodes.ranks)

    def work(rank: int, gathering: Gathering) -> Any:
        gathering.give("topic", rank, {"rank": rank}, nodes.ranks, numbers)
        if rank == leaves and gathering.call_off("topic"):
            return "called off"
        try:
            return gathering.result("topic")
        except Interrupted:
            return "called off"

    results = nodes.all(work)
    assert len(results) == len(nodes.ranks)
    assert list(results.values()) in (["called off"] * 9, [list(nodes.ranks)] * 9)


def test_a_courier_brings_the_next_topic_after_one_was_called_off(nodes: Nodes) -> None:
    first, *others = nodes.ranks

    def work(rank: int, gathering: Gathering) -> Any:
        if rank != first:
            gathering.give("one", rank, {}, nodes.ranks, numbers)
        else:
            gathering.call_off("one")
        gathering.give("two", rank, {"rank": rank}, nodes.ranks, numbers)
        return gathering.result("two")

    assert nodes.all(work) == dict.fromkeys(nodes.ranks, list(nodes.ranks))
    assert others


def test_who_is_missing(nodes: Nodes) -> None:
    for rank in (0, 2, 3, 4, 5, 7):
        nodes.gathering(rank).give("topic", rank, {}, nodes.ranks, numbers)
    assert nodes.gathering(0).missing("topic", 0, nodes.ranks) == [1, 6, 7, 8]
    assert nodes.gathering(3).missing("topic", 3, nodes.ranks) == [0, 1, 2, 6, 7, 8]


def test_a_replacement_on_another_node_reads_the_conclusion(nodes: Nodes) -> None:
    def work(rank: int, gathering: Gathering) -> Any:
        gathering.give("topic", rank, {"rank": rank}, nodes.ranks, numbers)
        return gathering.result("topic")

    assert not nodes.gathering(0).known("topic")
    nodes.all(work)
    nodes.near[0] = serve(LOOPBACK)
    replacement = nodes.gathering(0)
    assert replacement.known("topic")
    assert replacement.result("topic") == list(nodes.ranks)


def test_adding_twice_over_a_broken_connection_keeps_nobody_waiting(nodes: Nodes) -> None:
    """`SharedStore` adds again if it got no answer. So perhaps nobody sees the exact number."""
    nodes.run.add(keys.come("topic"), 3)

    def work(rank: int, gathering: Gathering) -> Any:
        gathering.give("topic", rank, {"rank": rank}, nodes.ranks, numbers)
        return gathering.result("topic")

    assert nodes.all(work) == dict.fromkeys(nodes.ranks, list(nodes.ranks))
