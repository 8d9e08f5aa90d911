"""The bits are a function of the gradients: not of the peer, the run, R or the partition."""

import hashlib
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.optim import AdamW

from lightning_replica.core.grid import Grid
from lightning_replica.groups.membership import Groups, make_groups
from lightning_replica.sharding.commit import Request
from tests.support.ranks import open_world, run_ranks
from tests.support.sharded import apply, digest, make_state


def model(dtype: torch.dtype) -> nn.Module:
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(33, 50), nn.Tanh(), nn.LayerNorm(50), nn.Linear(50, 7), nn.Linear(7, 1))
    return net.to(dtype)


def train(groups: Groups, dtype: torch.dtype, request: Request, **options: Any) -> tuple[str, list[list[int]]]:
    """The weights' hash, and the digest of every rank after every step."""
    net = model(dtype)
    optimizer = AdamW(net.parameters(), lr=1e-2, amsgrad=True)
    state = make_state(groups, net.parameters(), optimizer, **options)
    generator = torch.Generator().manual_seed(groups.rank)
    digests = []
    for _ in range(5):
        x = torch.randn(8, 33, generator=generator).to(dtype)
        state.begin_window(False)
        optimizer.zero_grad()
        state.before_backward(reduce=True)
        net(x).square().mean().backward()
        apply(state, request)
        everyone = [0] * groups.grid.size
        dist.all_gather_object(everyone, digest(state))
        digests.append(everyone)
    state.release()
    weights = b"".join(p.detach().view(torch.uint8).numpy().tobytes() for p in net.parameters())
    return hashlib.sha256(weights).hexdigest(), digests


def train_all(rank: int, store: Any) -> list[Any]:
    open_world(rank, store, 4)
    groups = {replicas: make_groups(Grid.of(4, replicas), rank, timedelta(seconds=60)) for replicas in (1, 2, 4)}
    results = []
    for dtype in (torch.float32, torch.bfloat16, torch.float64):
        for clip in (None, 0.01):
            for partition in ("element", "parameter"):
                for replicas in (1, 2, 4, 4):  # the last one is the same run twice
                    weights, digests = train(groups[replicas], dtype, Request(clip_norm=clip), partition=partition)
                    results.append([str(dtype), clip, partition, replicas, weights, digests])
    return results


def test_the_bits_depend_on_nothing_but_the_gradients() -> None:
    ranks = run_ranks(4, train_all)
    weights: dict[tuple[Any, ...], set[str]] = {}
    runs: dict[tuple[Any, ...], list[Any]] = {}
    for dtype, clip, partition, replicas, own, digests in (run for rank in ranks for run in rank):
        # A clipped step depends on how the norm is added up, over pieces that the partition cuts.
        weights.setdefault((dtype, clip, partition if clip else "any"), set()).add(own)
        runs.setdefault((dtype, clip, partition, replicas), []).append(digests)
        for everyone in digests:
            shards = 4 // replicas
            for shard in range(shards):
                assert len(set(everyone[shard::shards])) == 1, (dtype, clip, partition, replicas, everyone)
            assert len(set(everyone)) == shards, (dtype, clip, partition, replicas, everyone)
        assert len({tuple(everyone) for everyone in digests}) == 5  # a digest sees a step
    assert len(weights) == 9
    assert all(len(hashes) == 1 for hashes in weights.values()), weights
    assert all(run == several[0] for several in runs.values() for run in several)
