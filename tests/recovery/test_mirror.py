from typing import Any

import torch
import torch.distributed as dist

from lightning_replica.recovery.mirror import Mirrors
from lightning_replica.recovery.planner import Mirror
from tests.support.ranks import open_world, run_ranks


def wait(work: Any) -> None:
    if work is not None:
        work.wait()


def payload(rank: int, size: int) -> bytes:
    return bytes([rank + 1]) * size


def exchange(rank: int, store: Any) -> Any:
    open_world(rank, store, 3)
    mirrors = Mirrors(rank, wait)
    mirrors.connect(dist.group.WORLD, (0, 1, 2))
    seen = []
    for step, sizes in enumerate([(10, 10, 10), (10, 50_000, 10), (200_000, 1, 60_000)]):
        mirrors.begin("tail", step, payload(rank, sizes[rank]))
        mirrors.settle()
        seen.append(
            all(
                mirrors.payload(Mirror(peer, "tail", step)) == payload(peer, sizes[peer])
                for peer in range(3)
                if peer != rank
            )
        )
    steps = sorted({mirror.step for mirror in mirrors.held()})
    mirrors.begin("batch", 2, b"batch")
    mirrors.settle()
    kept = sorted({(mirror.kind, mirror.step) for mirror in mirrors.held()})
    mirrors.keep("batch", 2)
    return [seen, steps, kept, sorted({(mirror.kind, mirror.step) for mirror in mirrors.held()})]


def test_payloads_of_any_size_arrive_and_old_ones_go() -> None:
    for seen, steps, kept, last in run_ranks(3, exchange):
        assert seen == [True, True, True]
        assert steps == [0, 1, 2]
        assert kept == [["batch", 2], ["tail", 2]]
        assert last == [["batch", 2]]


def damage(rank: int, store: Any) -> Any:
    open_world(rank, store, 2)
    mirrors = Mirrors(rank, wait)
    mirrors.connect(dist.group.WORLD, (0, 1))
    mirrors.begin("tail", 4, b"private")
    mirrors.settle()
    whole = [mirror.rank for mirror in mirrors.held()]
    # The newer copy of the same state is cut short; the older one still serves.
    (rows,) = mirrors._rows.values()
    rows.append(torch.zeros_like(rows[0]))
    older = [mirror.rank for mirror in mirrors.held()]
    rows[0][:, 30] += 1
    return [whole, older, [mirror.rank for mirror in mirrors.held()]]


def test_a_damaged_message_is_not_held() -> None:
    assert run_ranks(2, damage) == [[[1], [1], []], [[0], [0], []]]
