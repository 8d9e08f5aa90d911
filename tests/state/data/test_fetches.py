"""What a CombinedLoader fetches, in every mode, from any fetch on, by ranks that were there and by new ones."""

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from lightning.pytorch.utilities import CombinedLoader
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, IterableDataset

from lightning_replica.devices.host import rng_state, set_rng_state
from lightning_replica.state.data.fetches import fetches_of
from lightning_replica.state.data.in_loops import put_in, take_out

MODES = ("min_size", "max_size", "max_size_cycle", "sequential")


class Noisy(Dataset[Tensor]):
    """Draws a random number for every sample."""

    def __init__(self, length: int) -> None:
        self._length = length

    def __len__(self) -> int:
        return self._length

    def __getitem__(self, index: int) -> Tensor:
        return torch.tensor([float(index), float(torch.rand(()))])


class Stream(IterableDataset[Tensor]):
    """Without a length."""

    def __iter__(self) -> Iterator[Tensor]:
        for number in range(5):
            yield torch.tensor([100.0 + number, float(torch.rand(()))])


class Mine(CombinedLoader):
    """Of the user's own class."""


def combined(mode: Any, limits: list[int | float] | None, workers: int = 0) -> CombinedLoader:
    loaders = {
        "short": DataLoader(Noisy(2), shuffle=True),
        "stream": DataLoader(Stream(), batch_size=2),
        "long": DataLoader(Noisy(7), shuffle=True, num_workers=workers, persistent_workers=workers > 0),
    }
    made = Mine(loaders, mode)
    made.limits = limits
    put_in(made, noted=True)
    return made


def told(fetch: Any) -> Any:
    """Plain data, and a number drawn after it, as a training step would."""
    batch, *numbers = fetch
    parts = batch if isinstance(batch, dict) else {"": batch}
    return {name: None if part is None else part.tolist() for name, part in parts.items()}, numbers


def rest(of: CombinedLoader) -> list[Any]:
    found = []
    while True:
        try:
            found.append((told(next(of)), float(torch.rand(()))))
        except StopIteration:
            return found


def check(mode: Any, limits: list[int | float] | None, done: int, back: int, there: bool, workers: int = 0) -> bool:
    """Fetches ``done`` times in the second epoch, and goes back; whether there were so many fetches."""
    torch.manual_seed(5)
    one = combined(mode, limits, workers)
    rest(iter(one))
    iter(one)
    seen: list[Any] = []
    for _ in range(done):
        fetches = fetches_of(one)
        assert fetches is not None
        fetches.mark(min(1, len(seen)))
        try:
            seen.append(told(next(one)))
        except StopIteration:
            break
        torch.rand(())
    fetches = fetches_of(one)
    assert fetches is not None
    (states, fetching), random = fetches.state(back), rng_state()
    expected = rest(one)
    other = one
    if not there:
        torch.manual_seed(1234)
        other = combined(mode, limits, workers)
    fetches = fetches_of(other)
    assert fetches is not None
    fetches.rewind(states, fetching)
    iter(other)
    again = seen[max(0, len(seen) - back) :]
    assert [told(next(other)) for _ in again] == again
    set_rng_state(random)
    assert rest(other) == expected
    for each in {one, other}:
        take_out(each)
    return len(seen) == done


@pytest.mark.parametrize("there", [True, False])
@pytest.mark.parametrize("mode", MODES)
def test_from_any_fetch_on(mode: str, there: bool) -> None:
    limits_of: list[list[int | float] | None] = [None, [1, 2, 4]]
    for limits in limits_of:
        for back in (0, 1, 2):
            done = back
            while check(mode, limits, done, back, there):
                done += 1
            assert done > 1


@pytest.mark.parametrize("there", [True, False])
@pytest.mark.parametrize("mode", MODES)
def test_with_workers_that_stay(mode: str, there: bool) -> None:
    assert check(mode, None, 3 - (mode == "min_size"), 2, there, workers=1)


def test_a_combined_loader_of_the_users_is_left_as_it_was() -> None:
    one = combined("min_size", None)
    own = Mine({"a": [1]}, "min_size")
    assert isinstance(one, Mine)
    assert type(one) is not Mine
    take_out(one)
    assert type(one) is Mine
    assert vars(one).keys() == vars(own).keys()
