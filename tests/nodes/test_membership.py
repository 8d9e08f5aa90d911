"""Who is in, with a real store and threads that are nodes: torchelastic's rendezvous, one node after the other."""

import threading
from datetime import timedelta

import pytest
import torch.distributed as dist

from lightning_replica.control import keys
from lightning_replica.errors import ConfigurationError
from lightning_replica.nodes import membership
from lightning_replica.nodes.membership import Member, join, register
from lightning_replica.nodes.placement import Placement
from lightning_replica.nodes.settings import NodeSettings
from lightning_replica.stores.address import StoreAddress
from lightning_replica.stores.tcp import connect, serve


def settings(nnodes: int, join_timeout_s: float = 60.0) -> NodeSettings:
    return NodeSettings(nnodes, 1, StoreAddress("127.0.0.1", 1), "run", "127.0.0.1", join_timeout_s=join_timeout_s)


def come(store: dist.TCPStore, nnodes: int, found: dict[int, Placement]) -> None:
    own = connect("127.0.0.1", store.port)
    member = register(own, "127.0.0.1", 1, "node")
    found[member.number] = join(own, member, settings(nnodes))


@pytest.mark.parametrize(("nnodes", "spares"), [(1, 0), (1, 2), (4, 0), (4, 3)])
def test_all_learn_the_same_placement(nnodes: int, spares: int) -> None:
    store, found = serve("127.0.0.1"), dict[int, Placement]()
    threads = [threading.Thread(target=come, args=(store, nnodes, found)) for _ in range(nnodes + spares)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(found) == nnodes + spares
    assert len(set(found.values())) == 1
    assert found[0].nodes == set(range(nnodes))  # those that came first
    assert store.add(keys.NODES_JOINED, 0) >= nnodes


def test_a_node_that_dies_before_it_joins_holds_up_nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(membership, "_TURN", timedelta(seconds=0.1))
    store, found = serve("127.0.0.1"), dict[int, Placement]()
    register(store, "127.0.0.1", 1, "dead")
    threads = [threading.Thread(target=come, args=(store, 2, found)) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found[1] == found[2]
    assert found[1].nodes == {1, 2}


def test_too_few_nodes() -> None:
    store = serve("127.0.0.1")
    member: Member = register(store, "127.0.0.1", 1, "a")
    with pytest.raises(ConfigurationError, match="Only 1 of nnodes=2 nodes have come to 127.0.0.1:1 within 0.2 s"):
        join(store, member, settings(2, join_timeout_s=0.2))
