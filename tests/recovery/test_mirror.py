from typing import Any

import torch

from lightning_replica.core.digests import Digest
from lightning_replica.recovery.mirror import Mirrors
from lightning_replica.recovery.planner import Mirror
from tests.support.ranks import open_world, run_ranks
from tests.support.typed import world_group


def wait(work: Any) -> None:
    if work is not None:
        work.wait()


def payload(rank: int, size: int) -> bytes:
    return bytes([rank + 1]) * size


def exchange(rank: int, store: Any) -> Any:
    open_world(rank, store, 3)
    mirrors = Mirrors(rank, wait)
    mirrors.connect(world_group(), (0, 1, 2))
    seen = []
    for step, sizes in enumerate([(10, 10, 10), (10, 50_000, 10), (200_000, 1, 60_000)]):
        digests = {peer: Digest(7, -(2**62) + peer, peer == step) for peer in range(3)}
        mirrors.begin("tail", step, payload(rank, sizes[rank]), digests[rank])
        mirrors.settle()
        assert mirrors.digests(step) == digests
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
    assert mirrors.digests(3) == {}
    kept = sorted({(mirror.kind, mirror.step) for mirror in mirrors.held()})
    mirrors.keep("batch", 2)
    # A replacement holds its peers' states before any collective.
    target = (rank + 1) % 3
    shared = mirrors.share(target, "batch", 2, b"own")
    new = Mirrors(target, wait)
    new.connect(world_group(), (0, 1, 2))
    new.adopt("batch", 2, shared)
    held = {peer: new.payload(Mirror(peer, "batch", 2)) for peer in range(3) if peer != target}
    seen.append(held == shared and held[rank] == b"own")
    return [seen, steps, kept, sorted({(mirror.kind, mirror.step) for mirror in mirrors.held()})]


def test_payloads_of_any_size_arrive_and_old_ones_go() -> None:
    for seen, steps, kept, last in run_ranks(3, exchange):
        assert seen == [True, True, True, True]
        assert steps == [0, 1, 2]
        assert kept == [["batch", 2], ["tail", 2]]
        assert last == [["batch", 2]]


def damage(rank: int, store: Any) -> Any:
    open_world(rank, store, 2)
    mirrors = Mirrors(rank, wait)
    mirrors.connect(world_group(), (0, 1))
    mirrors.begin("tail", 4, b"private")
    mirrors.settle()
    assert mirrors.digests(4) == {}  # none was sent
    whole = [mirror.rank for mirror in mirrors.held()]
    # The newer copy of the same state is cut short; the older one still serves.
    (rows,) = mirrors._rows.values()
    rows.append([torch.zeros_like(row) for row in rows[0]])
    older = [mirror.rank for mirror in mirrors.held()]
    for row in rows[0]:
        row[50] += 1  # in the payload
    return [whole, older, [mirror.rank for mirror in mirrors.held()]]


def lie(rank: int, store: Any) -> Any:
    open_world(rank, store, 2)
    mirrors = Mirrors(rank, wait)
    mirrors.connect(world_group(), (0, 1))
    mirrors.begin("tail", 4, b"private", Digest(9, 8, False))
    mirrors.settle()
    for row in mirrors._rows["tail", 4][-1]:
        row[32] += 1  # in the digest
    return list(mirrors.digests(4))


def test_a_damaged_digest_is_not_heard() -> None:
    assert run_ranks(2, lie) == [[], []]


def test_a_damaged_message_is_not_held() -> None:
    assert run_ranks(2, damage) == [[[1], [1], []], [[0], [0], []]]
