"""What is the user's of what a loader draws from, wherever it is kept."""

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
from lightning.fabric.utilities.distributed import DistributedSamplerWrapper
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    RandomSampler,
    Sampler,
    SubsetRandomSampler,
    WeightedRandomSampler,
)

from lightning_replica.state.data.sources import Sources, sources_of


class Order(Sampler[int]):
    """Shuffles what it shuffled the last time, with a generator of its own."""

    def __init__(self) -> None:
        self.order, self.dice = np.arange(16), np.random.default_rng(7)

    def __iter__(self) -> Iterator[int]:
        self.dice.shuffle(self.order)
        return iter(self.order)

    def __len__(self) -> int:
        return 16


class Of(Sampler[int]):
    """A sampler of another, or of some, under a name of its author's choice."""

    def __init__(self, orders: Any) -> None:
        self.base_orders = orders

    def __iter__(self) -> Iterator[int]:
        known = self.base_orders
        orders = [known] if isinstance(known, Sampler) else known.values() if isinstance(known, dict) else known
        return iter([index for order in orders for index in order])

    def __len__(self) -> int:
        return 16


def seeded() -> torch.Generator:
    return torch.Generator().manual_seed(3)


def wrapped(sampler: Any) -> Any:
    """As Lightning divides a sampler among ranks."""
    return DistributedSamplerWrapper(sampler, num_replicas=2, rank=1, shuffle=False)


MADE: dict[str, Callable[[], Any]] = {
    "plain": lambda: {"sampler": Order(), "batch_size": 2},
    "divided": lambda: {"sampler": wrapped(Order()), "batch_size": 2},
    "of one": lambda: {"sampler": Of(Order()), "batch_size": 2},
    "of some": lambda: {"sampler": wrapped(Of([Order(), Order()])), "batch_size": 2},
    "of a dictionary": lambda: {"sampler": Of({"a": Order()}), "batch_size": 2},
    "generator": lambda: {"sampler": RandomSampler(range(16), generator=seeded()), "batch_size": 2},
    "weights": lambda: {
        "sampler": wrapped(WeightedRandomSampler([1.0] * 16, 16, generator=seeded())),
        "batch_size": 2,
    },
    "subset": lambda: {"batch_sampler": BatchSampler(SubsetRandomSampler(range(16), seeded()), 2, drop_last=False)},
    "in batches": lambda: {"batch_sampler": BatchSampler(wrapped(Order()), 2, drop_last=False)},
    "divided in batches": lambda: {"batch_sampler": BatchSampler(wrapped(Of(Of(Order()))), 2, drop_last=False)},
}


def new(**options: Any) -> Any:
    return DataLoader(torch.arange(16), **options)  # type: ignore[arg-type]


@pytest.mark.parametrize("name", MADE)
def test_a_sampler_goes_on_from_epoch_to_epoch(name: str) -> None:
    loader, fresh = (new(**MADE[name]()) for _ in range(2))
    sources, others = Sources(sources_of(loader)), Sources(sources_of(fresh))
    for _ in range(2):
        first = [batch.tolist() for batch in loader]
    state = sources.state()
    following = [batch.tolist() for batch in loader]
    others.put(state)
    assert [batch.tolist() for batch in fresh] == following != first
