"""The number of collectives in a step: it depends on neither N nor R. Counted on groups that send nothing."""

from collections import Counter
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.testing._internal.distributed.fake_pg import FakeStore

from lightning_replica.core.grid import Grid
from lightning_replica.groups.membership import make_groups
from tests.support.ranks import run_ranks
from tests.support.sharded import make_state, train_step

KINDS = ("all_to_all_single", "all_gather_single", "all_gather_into_tensor", "all_gather", "broadcast", "all_reduce")


def count(rank: int, store: Any, size: int, replicas: int, nodes: int, partition: str) -> Any:
    """The collectives of a step for each bucket, by kind; all-reduces, of a few numbers, for the whole step."""
    dist.init_process_group("fake", rank=rank, world_size=size, store=FakeStore())
    counted: Counter[str] = Counter()

    def counting(name: str, function: Any) -> Any:
        def call(*args: Any, **kwargs: Any) -> Any:
            counted[name] += 1
            return function(*args, **kwargs)

        return call

    groups = make_groups(Grid.of(size, replicas, nodes), rank, timedelta(seconds=60))
    for name in KINDS:
        if hasattr(dist, name):
            setattr(dist, name, counting(name, getattr(dist, name)))
    net = nn.Sequential(*[nn.Linear(128, 128) for _ in range(8)])
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    options = {"partition": partition, "shared_memory": False, "bucket_bytes": 2**16}
    state = make_state(groups, net.parameters(), optimizer, **options)
    counted.clear()
    train_step(state, lambda: net(torch.ones(1, 128)).sum().backward())
    buckets = len(state.buffers[0].layout.buckets)
    assert buckets > 3
    return [{name: number / (buckets if name != "all_reduce" else 1) for name, number in counted.items()}, buckets]


def counted(size: int, replicas: int, nodes: int, partition: str = "element") -> dict[str, float]:
    ((found, _),) = run_ranks(1, count, size, replicas, nodes, partition)
    found["all_gather_single"] = found.pop("all_gather_into_tensor", 0) + found.get("all_gather_single", 0)
    return dict(found)


@pytest.mark.parametrize(
    ("local", "nodes", "replicas", "expected"),
    [
        # On one node: an exchange; R broadcasts bring peers their pieces; R gathers.
        (64, 1, 2, {"all_to_all_single": 1, "broadcast": 2, "all_gather_single": 2, "all_reduce": 1}),
        (1024, 1, 2, {"all_to_all_single": 1, "broadcast": 2, "all_gather_single": 2, "all_reduce": 1}),
        (1024, 1, 8, {"all_to_all_single": 1, "all_gather": 1, "all_gather_single": 8, "all_reduce": 1}),
        # On two nodes: an exchange on each level; the gather does not leave the node.
        (32, 2, 2, {"all_to_all_single": 2, "broadcast": 2, "all_gather_single": 1, "all_reduce": 1}),
        (512, 2, 2, {"all_to_all_single": 2, "broadcast": 2, "all_gather_single": 1, "all_reduce": 1}),
        # On more: R gathers between nodes, and one on the node.
        (8, 16, 2, {"all_to_all_single": 2, "broadcast": 2, "all_gather_single": 3, "all_reduce": 1}),
        (8, 128, 2, {"all_to_all_single": 2, "broadcast": 2, "all_gather_single": 3, "all_reduce": 1}),
        (8, 128, 1, {"all_to_all_single": 2, "all_gather_single": 2, "all_reduce": 1}),
    ],
)
def test_a_step(local: int, nodes: int, replicas: int, expected: dict[str, float]) -> None:
    assert counted(local * nodes, replicas, nodes) == expected


def test_whole_parameters_take_a_broadcast_each() -> None:
    """Where pieces differ in size, parameters are broadcast: 2 in each of these buckets, whatever N is."""
    few, many = counted(64, 2, 8, "parameter"), counted(1024, 2, 128, "parameter")
    assert many["all_to_all_single"] == few["all_to_all_single"] == 2
    assert few["broadcast"] <= 3 * 4
    assert many["broadcast"] <= 3 * 4
