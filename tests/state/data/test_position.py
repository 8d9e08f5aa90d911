"""Any position of any epoch, with the same batches and the same random numbers after it."""

import sys
from collections import Counter
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.utils.data import (
    DataLoader,
    Dataset,
    DistributedSampler,
    IterableDataset,
    Sampler,
    TensorDataset,
    WeightedRandomSampler,
)

from lightning_replica.core.inexact import Inexact
from lightning_replica.devices.host import rng_state, set_rng_state
from lightning_replica.state.data.position import ExactLoader, LoaderState
from lightning_replica.state.data.sources import TrainingObjects
from lightning_replica.state.objects.capture import Root

BATCHES = 7


def loaded() -> Counter[str]:
    """Return how often this process has loaded a sample. A variable of this file would go with a position."""
    counter: Counter[str] = vars(sys).setdefault("loaded_in_tests", Counter())
    return counter


class Noisy(Dataset[Tensor]):
    """Draws a random number for every sample, as augmentation does; counts what it loads."""

    loaded = 0

    def __len__(self) -> int:
        return 2 * 3 * BATCHES

    def __getitem__(self, index: int) -> Tensor:
        self.loaded += 1
        loaded()["here"] += 1
        return torch.tensor([float(index), float(torch.rand(()))])


def loader(workers: int = 0) -> ExactLoader:
    data = Noisy()
    sampler: DistributedSampler[Tensor] = DistributedSampler(data, num_replicas=2, rank=1, shuffle=True, seed=3)
    return ExactLoader(DataLoader(data, batch_size=3, sampler=sampler, num_workers=workers), rng_state, set_rng_state)


def epoch(exact: ExactLoader, number: int) -> list[Any]:
    """Every batch, and a random number drawn after it, as a training step would."""
    exact.sampler.set_epoch(number)
    return [(batch.tolist(), float(torch.rand(()))) for batch in exact]


def straight() -> list[list[Any]]:
    torch.manual_seed(5)
    exact = loader()
    return [epoch(exact, 0), epoch(exact, 1)]


@settings(deadline=None)
@given(st.integers(0, BATCHES), st.integers(0, BATCHES), st.booleans())
def test_a_rank_that_was_there_goes_back(stop: int, back: int, mark: bool) -> None:
    expected = straight()
    back = min(back, stop)
    torch.manual_seed(5)
    exact = loader()
    epoch(exact, 0)
    exact.sampler.set_epoch(1)
    batches, seen = iter(exact), []
    for number in range(stop):
        if number == back:
            state, place = rng_state(), exact.state()
            if mark:
                exact.mark()
        seen.append((next(batches).tolist(), float(torch.rand(()))))
    if stop > back:
        exact.sampler.set_epoch(1)
        exact.rewind(place)
        set_rng_state(state)
        seen[back:] = [(batch.tolist(), float(torch.rand(()))) for batch in exact]
    else:
        seen += [(batch.tolist(), float(torch.rand(()))) for batch in batches]
    assert seen == expected[1]


@pytest.mark.parametrize("position", range(BATCHES + 1))
def test_a_replacement_skips_without_loading(position: int) -> None:
    expected = straight()
    torch.manual_seed(5)
    exact = loader()
    epoch(exact, 0)
    exact.sampler.set_epoch(1)
    batches = iter(exact)
    for _ in range(position):
        next(batches)
        torch.rand(())
    state, place = rng_state(), exact.state()

    torch.manual_seed(1234)
    fresh = loader()
    loaded().clear()
    fresh.sampler.set_epoch(1)
    fresh.rewind(place)
    set_rng_state(state)
    assert fresh.position == position
    rest = [(batch.tolist(), float(torch.rand(()))) for batch in fresh]
    if position:  # at 0 a loader draws its own seed with the first batch, and did so in the straight run, too
        assert rest == expected[1][position:]
    assert [batch for batch, _ in rest] == [batch for batch, _ in expected[1][position:]]
    assert loaded()["here"] == 3 * (BATCHES - position)
    assert fresh.dataset.loaded == 3 * (BATCHES + BATCHES)  # as if it had loaded both epochs itself


def test_going_back_into_the_epoch_before() -> None:
    expected = straight()
    exact = loader()
    exact.sampler.set_epoch(1)
    next(iter(exact))
    exact.sampler.set_epoch(0)
    exact.rewind(LoaderState(5))
    assert [[row[0] for row in batch.tolist()] for batch in exact] == [[r[0] for r in b] for b, _ in expected[0][5:]]


class Stills(Dataset[Any]):
    def __len__(self) -> int:
        return 4

    def __getitem__(self, index: int) -> Any:
        return {"images": [torch.full((2,), float(index))], "of": SimpleNamespace(label=torch.ones(()))}


@pytest.mark.parametrize("where", ["container", "object", "replaced", "nowhere"])
@pytest.mark.parametrize("workers", [0, 1])
def test_a_batch_that_code_has_written_to_is_loaded_again(workers: int, where: str) -> None:
    exact = ExactLoader(DataLoader(Stills(), batch_size=None, num_workers=workers), rng_state, set_rng_state)
    iterated = iter(exact)
    next(iterated)
    start = exact.state()
    exact.mark(start)
    batch = next(iterated)
    if where == "replaced":
        batch["of"].label = batch["of"].label / 2
    elif where != "nowhere":
        (batch["images"][0] if where == "container" else batch["of"].label).div_(2)
    exact.rewind(start)
    again = next(iter(exact))
    assert (again is batch) == (where == "nowhere")
    assert (again["images"][0].tolist(), again["of"].label.item()) == ([1.0, 1.0], 1.0)
    exact.close()


NOISE = np.random.default_rng(0)


class OfTheFile(Dataset[Any]):
    """Draws from a generator of its file, and counts in its class."""

    loaded = 0

    def __len__(self) -> int:
        return 6

    def __getitem__(self, index: int) -> list[float]:
        type(self).loaded += 1
        return [index, NOISE.random(), self.loaded]


@pytest.mark.parametrize("taken", [2, 3])
@pytest.mark.parametrize("goes", ["back", "back, and the code's variables with it", "to another process"])
def test_what_a_dataset_changes_in_variables_of_its_code(taken: int, goes: str) -> None:
    beginning = NOISE.bit_generator.state
    OfTheFile.loaded = 0

    def load() -> ExactLoader:
        return ExactLoader(DataLoader(OfTheFile(), batch_size=None), rng_state, set_rng_state)

    untouched = list(load())
    NOISE.bit_generator.state, OfTheFile.loaded = beginning, 0
    exact = load()
    batches = iter(exact)
    seen = [next(batches) for _ in range(taken)]
    place, then = exact.state(), (NOISE.bit_generator.state, OfTheFile.loaded)
    next(batches)
    if goes == "to another process":
        NOISE.bit_generator.state, OfTheFile.loaded = beginning, 0
        exact = load()
    elif "with it" in goes:
        NOISE.bit_generator.state, OfTheFile.loaded = then
    exact.rewind(place)
    assert [*seen, *exact] == untouched


class Makes:
    """An object of the training with a method that draws from a generator of its file."""

    def noise(self) -> float:
        return NOISE.random()

    def loader(self, former: Any = ()) -> ExactLoader:
        data = DataLoader(Made(self), batch_size=None)
        training = TrainingObjects([("module", self)], [Root(self, "module")])
        return ExactLoader(data, rng_state, set_rng_state, former=former, training=training)


class Made(Dataset[Any]):
    """Asks an object of the training for its data."""

    def __init__(self, maker: Makes) -> None:
        self.maker = maker

    def __len__(self) -> int:
        return 6

    def __getitem__(self, index: int) -> list[float]:
        return [index, self.maker.noise()]


def test_variables_of_a_method_of_the_module_that_a_dataset_calls() -> None:
    beginning = NOISE.bit_generator.state
    untouched = list(Makes().loader())
    NOISE.bit_generator.state = beginning
    exact = Makes().loader()
    batches = iter(exact)
    seen, place = [next(batches), next(batches)], exact.state()
    then = NOISE.bit_generator.state
    next(batches)
    NOISE.bit_generator.state = then
    exact.rewind(place)
    assert [*seen, *exact] == untouched


def test_variables_that_loading_changes_where_loaders_are_made_for_each_epoch() -> None:
    beginning, makes = NOISE.bit_generator.state, Makes()
    first = makes.loader()
    epoch, second = list(first), makes.loader([first])
    iter(second)
    place, following = second.state(), list(second)
    NOISE.bit_generator.state = beginning  # of another process
    joined = Makes().loader()
    joined.rewind(place)
    assert list(joined) == following != epoch


def test_a_loader_that_is_no_dataloader() -> None:
    exact = ExactLoader([10, 20, 30], rng_state, set_rng_state)
    exact.rewind(LoaderState(2))
    assert list(exact) == [30]
    assert list(exact) == [10, 20, 30]
    assert len(exact) == 3


class Remembers(Sampler[int]):
    """Keeps what it has yielded in a list that becomes too large to be kept with each position."""

    def __init__(self) -> None:
        self.seen: list[Any] = []

    def __iter__(self) -> Iterator[int]:
        for index in range(30):
            self.seen += [index, (index,)] * 250
            yield index


def test_what_is_too_large_to_be_kept_with_a_position_is_named() -> None:
    inexact = Inexact()
    data = DataLoader(Noisy(), batch_size=3, sampler=Remembers())
    exact = ExactLoader(data, rng_state, set_rng_state, inexact.report)
    for _ in exact:
        exact.state()
    ((name, finding),) = inexact.known.items()
    assert (name, finding.scope) == ("Remembers of the loader.seen", "fault")
    assert "it is too large to be kept with the position of its loader" in finding.why


def weighted(inexact: Inexact, samples: int = 12) -> tuple[ExactLoader, WeightedRandomSampler]:
    sampler = WeightedRandomSampler([1.0] * samples, samples)
    data = TensorDataset(torch.arange(samples))
    return ExactLoader(
        DataLoader(data, batch_size=3, sampler=sampler), rng_state, set_rng_state, inexact.report
    ), sampler


def numbers(batches: Iterator[Any], count: int) -> list[Any]:
    return [next(batches)[0].tolist() for _ in range(count)]


@pytest.mark.parametrize("replaced", [True, False])
def test_weights_of_a_sampler_that_hooks_change(replaced: bool) -> None:
    """Those of the next epoch are drawn with what they are then; the rest of this one with what they were."""
    torch.manual_seed(7)
    inexact = Inexact()
    exact, sampler = weighted(inexact)
    batches = iter(exact)
    numbers(batches, 2)
    sampler.weights[3] = 20.0
    state, random = exact.with_content(exact.state(), True), rng_state()
    expected = [numbers(batches, 2), numbers(iter(exact), 4)]
    if replaced:
        exact, sampler = weighted(inexact)
    else:
        sampler.weights[5] = 30.0
    exact.rewind(state)
    exact.put_content(state)
    set_rng_state(random)
    assert [numbers(iter(exact), 2), numbers(iter(exact), 4)] == expected
    assert float(sampler.weights[3]) == 20.0
    assert not inexact.known


class Stream(IterableDataset[int]):
    """Keeps where it is, and goes by what hooks set."""

    def __init__(self) -> None:
        self.place, self.level = 0, 1

    def __iter__(self) -> Iterator[int]:
        for self.place in range(12):
            yield self.place * self.level


@pytest.mark.parametrize("changes", ["between epochs", "between batches"])
def test_hooks_that_change_a_stream_while_it_is_iterated(changes: str) -> None:
    inexact, data = Inexact(), Stream()
    exact = ExactLoader(DataLoader(data, batch_size=3), rng_state, set_rng_state, inexact.report)
    for number in range(3):
        batches = iter(exact)
        data.level = number
        for _ in batches:
            data.level += changes == "between batches"
    assert [*inexact.known] == ["Stream of the loader.level"] * (changes == "between batches")


def test_data_of_another_length_are_named() -> None:
    inexact = Inexact()
    exact, _ = weighted(inexact)
    next(iter(exact))
    other, _ = weighted(inexact, samples=15)
    other.rewind(exact.state())
    assert inexact.known["the data of the loader"].why.startswith("it has 5 batches here, and had 4")
