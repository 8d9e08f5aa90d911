"""The same batches, to the last random number drawn in a worker, wherever a new process begins in the epoch."""

import multiprocessing
import random
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import (
    ConcatDataset,
    DataLoader,
    Dataset,
    IterableDataset,
    RandomSampler,
    Subset,
    get_worker_info,
)

from lightning_replica.core.inexact import Inexact
from lightning_replica.devices.host import rng_state, set_rng_state
from lightning_replica.state.data.position import ExactLoader
from lightning_replica.state.data.sources import TrainingObjects
from lightning_replica.state.objects.capture import Root
from tests.support import forked

BATCHES = 7
pytestmark = pytest.mark.filterwarnings("ignore:This DataLoader will create 3 worker processes:UserWarning")


class Noisy(Dataset[Tensor]):
    def __len__(self) -> int:
        return 2 * BATCHES

    def __getitem__(self, index: int) -> Tensor:
        info = get_worker_info()
        noise = torch.rand(()) if index % 3 else 0.0  # some batches draw more than others
        return torch.tensor([float(index), float(noise), float(info.id) if info else -1.0])


class Stream(IterableDataset[Tensor]):
    """Shuffles in a buffer and adds noise, all with the global generators."""

    def __iter__(self) -> Iterator[Tensor]:
        info = get_worker_info()
        first, step = (info.id, info.num_workers) if info else (0, 1)
        order = torch.randperm(2 * BATCHES) if info else torch.arange(2 * BATCHES)
        for index in order[first::step].tolist():
            yield torch.tensor([float(index), float(torch.rand(()))])


class Augmented(Noisy):
    """Keeps what it draws from, as augmentation libraries do, and what it was asked for."""

    def __init__(self) -> None:
        self.dice, self.asked, self.seen = np.random.default_rng(4), 0, dict[int, list[int]]()
        self.inner = SimpleNamespace(level=np.zeros(2))

    def __getitem__(self, index: int) -> Tensor:
        self.asked += 1
        self.inner.level[index % 2] += 0.5
        self.seen.setdefault(index % 3, []).append(self.asked)
        drawn = [self.dice.normal(), float(self.inner.level.sum()), len(self.seen[index % 3])]
        return torch.cat([super().__getitem__(index), torch.tensor(drawn)])


class Counting(Noisy):
    """Counts in the class and in a global variable, and sees what hooks set there."""

    count = 0

    def __getitem__(self, index: int) -> Tensor:
        Counting.count += 1
        CALLS["asked"] = CALLS.get("asked", 0) + index
        return torch.cat([super().__getitem__(index), torch.tensor([float(Counting.count), float(CALLS["asked"])])])


class Pages(Stream):
    """Begins where its last epoch ended."""

    def __init__(self) -> None:
        self.page = 0

    def __iter__(self) -> Iterator[Tensor]:
        for item in super().__iter__():
            self.page += 1
            yield torch.cat([item, torch.tensor([float(self.page)])])


class Mixing:
    """Mixes with weights of its own."""

    def __init__(self) -> None:
        self.dice = random.Random(3)

    def __call__(self, samples: list[Tensor]) -> Tensor:
        return torch.stack(samples) + self.dice.random()


class Slotted(Noisy):
    __slots__ = ("asked",)

    def __init__(self) -> None:
        self.asked = 0

    def __getitem__(self, index: int) -> Tensor:
        self.asked += 1
        return torch.cat([super().__getitem__(index), torch.tensor([float(self.asked)])])


class Opened(Augmented):
    """Has a file that only its workers open, and reads it from its beginning each time."""

    file: Any = None

    def __getitem__(self, index: int) -> Tensor:
        self.file.seek(0)
        return super().__getitem__(index) + float(len(self.file.read()))


def open_file(worker: int) -> None:
    get_worker_info().dataset.file = Path(__file__).open("rb")  # type: ignore[union-attr]  # noqa: SIM115


def mixed(dice: random.Random, samples: list[Tensor]) -> Tensor:
    return torch.stack(samples) + dice.random()


def marked(samples: list[list[float]]) -> Tensor:
    for sample in samples:
        sample[1] += 1  # in the dataset
    return torch.tensor(samples)


CALLS: dict[str, int] = {}


def init(worker: int) -> None:
    torch.manual_seed(torch.initial_seed() + 3 * worker)


def with_generator(**options: Any) -> DataLoader[Tensor]:
    generator = torch.Generator().manual_seed(4)
    return DataLoader(Noisy(), batch_size=2, shuffle=True, generator=generator, **options)


KINDS: dict[str, Any] = {
    "none": lambda: DataLoader(Noisy(), batch_size=2, shuffle=True),
    "two": lambda: DataLoader(Noisy(), batch_size=2, shuffle=True, num_workers=2),
    "three": lambda: DataLoader(Noisy(), batch_size=2, sampler=RandomSampler(Noisy()), num_workers=3),
    "init": lambda: DataLoader(Noisy(), batch_size=2, num_workers=2, worker_init_fn=init),
    "persistent": lambda: DataLoader(Noisy(), batch_size=2, num_workers=2, persistent_workers=True),
    "generator": lambda: with_generator(),
    "generator and workers": lambda: with_generator(num_workers=2),
    "no batches": lambda: DataLoader(Noisy(), batch_size=None, shuffle=True),
    "augmented": lambda: DataLoader(Augmented(), batch_size=2, shuffle=True, num_workers=2),
    "augmented, persistent": lambda: DataLoader(Augmented(), batch_size=2, num_workers=2, persistent_workers=True),
    "augmented, started anew": lambda: DataLoader(
        Augmented(), batch_size=2, num_workers=2, persistent_workers=True, multiprocessing_context="spawn"
    ),
    "augmented, of a server": lambda: DataLoader(
        Augmented(), batch_size=2, num_workers=2, persistent_workers=True, multiprocessing_context=forked.context()
    ),
    "subset": lambda: DataLoader(
        Subset(ConcatDataset([Augmented(), Slotted()]), range(7, 21)), 2, num_workers=2, collate_fn=list
    ),
    "subset, no workers": lambda: DataLoader(Subset(Augmented(), range(14)), batch_size=2, shuffle=True),
    "slots": lambda: DataLoader(Slotted(), batch_size=2, num_workers=2),
    "partial": lambda: DataLoader(
        Noisy(), batch_size=2, num_workers=2, collate_fn=partial(mixed, random.Random(3)), persistent_workers=True
    ),
    "partial, no workers": lambda: DataLoader(Noisy(), batch_size=2, collate_fn=partial(mixed, random.Random(3))),
    "list": lambda: DataLoader(
        [[float(n), 0.0] for n in range(14)],  # type: ignore[arg-type]
        batch_size=2,
        collate_fn=marked,
    ),
    "list, persistent": lambda: DataLoader(
        [[float(n), 0.0] for n in range(14)],  # type: ignore[arg-type]
        batch_size=2,
        num_workers=2,
        collate_fn=marked,
        persistent_workers=True,
    ),
    "opened": lambda: DataLoader(Opened(), batch_size=2, num_workers=2, worker_init_fn=open_file),
    "counting": lambda: DataLoader(Counting(), batch_size=2, num_workers=3),
    "mixing": lambda: DataLoader(Noisy(), batch_size=2, num_workers=2, collate_fn=Mixing(), persistent_workers=True),
    "pages": lambda: DataLoader(Pages(), batch_size=2, num_workers=2, persistent_workers=True),
    "stream": lambda: DataLoader(Stream(), batch_size=2),
    "stream in workers": lambda: DataLoader(Stream(), batch_size=2, num_workers=2),
}


def loader(kind: str) -> ExactLoader:
    return ExactLoader(KINDS[kind](), rng_state, set_rng_state)


def plain_of(batch: Any) -> Any:
    return [plain_of(each) for each in batch] if isinstance(batch, list) else batch.tolist()


def take(batches: Iterator[Any], count: int) -> list[Any]:
    """Batches, with a random number drawn after each, as a training step would."""
    return [(plain_of(next(batches)), float(torch.rand(()))) for _ in range(count)]


def rest(batches: Iterator[Any]) -> list[Any]:
    return [(plain_of(batch), float(torch.rand(()))) for batch in batches]


def positions() -> list[Any]:
    """Each position with each kind; but for one, what takes ten seconds to start is behind the marker."""
    return [
        pytest.param(kind, at, marks=pytest.mark.combinations if kind.endswith("started anew") and at != 4 else ())
        for kind in KINDS
        for at in (0, 1, 4, 7)
    ]


@pytest.mark.parametrize(("kind", "position"), positions())
def test_a_new_process_begins_in_the_middle(kind: str, position: int) -> None:
    torch.manual_seed(5)
    exact = loader(kind)
    rest(iter(exact))
    batches = iter(exact)
    take(batches, position)
    place, drawn = exact.state(), rng_state()
    expected = rest(batches)
    expected_later = rest(iter(exact))

    torch.manual_seed(1234)
    fresh = loader(kind)
    fresh.rewind(place)
    set_rng_state(drawn)
    assert rest(iter(fresh)) == expected
    assert rest(iter(fresh)) == expected_later


@pytest.mark.parametrize("kind", [kind for kind in KINDS if not kind.endswith("started anew")])
def test_a_new_process_begins_between_epochs(kind: str) -> None:
    torch.manual_seed(5)
    exact = loader(kind)
    rest(iter(exact))
    place, drawn = exact.state_between(), rng_state()
    expected = rest(iter(exact))

    torch.manual_seed(1234)
    fresh = loader(kind)
    fresh.inherit(place)
    set_rng_state(drawn)
    assert rest(iter(fresh)) == expected


def test_the_loader_of_the_user_stays_as_it_is() -> None:
    own = KINDS["two"]()
    before = dict(vars(own))
    rest(iter(ExactLoader(own, rng_state, set_rng_state)))
    assert vars(own) == before


def test_workers_that_start_again_find_the_variables_of_that_time() -> None:
    CALLS["asked"] = 0
    exact = loader("counting")
    CALLS["asked"] = 100
    batches = iter(exact)
    take(batches, 1)  # two of the workers have reported nothing
    place, drawn = exact.state(), rng_state()
    CALLS["asked"] = 1000  # which is for the workers of the next epoch
    expected = rest(batches)

    CALLS["asked"] = 0
    fresh = loader("counting")
    CALLS["asked"] = 1000
    fresh.rewind(place)
    set_rng_state(drawn)
    assert rest(iter(fresh)) == expected
    assert CALLS["asked"] == 1000


class Weighed(Noisy):
    """Uses a module, or only its attributes."""

    def __init__(self, computes: bool) -> None:
        self.module, self.computes = nn.Linear(1, 1), computes

    def __getitem__(self, index: int) -> Tensor:
        factor = self.module(torch.ones(1)).detach() if self.computes else torch.ones(1) * self.module.in_features
        return super().__getitem__(index) * factor


@pytest.mark.parametrize("computes", [False, True])
def test_data_that_is_made_with_weights_is_named(computes: bool) -> None:
    data = Weighed(computes)
    of_model = TrainingObjects([("module", data.module)], [Root(data.module, "module", frozenset(vars(nn.Module())))])
    inexact = Inexact()
    exact = ExactLoader(
        DataLoader(data, batch_size=2, num_workers=2), rng_state, set_rng_state, inexact.report, (), of_model
    )
    take(iter(exact), 3)
    exact.rewind(exact.state())
    assert not inexact.known  # the workers are still there
    exact.close()
    exact.rewind(exact.state())
    assert ("the data of the loader" in inexact.known) == computes


class Shared(Augmented):
    """Has memory that all processes share, which the rank sets, and a generator of each worker's own."""

    def __init__(self) -> None:
        super().__init__()
        self.level, self.table = multiprocessing.Value("d", 1.0), torch.ones(2).share_memory_()
        self.view = np.frombuffer(multiprocessing.RawArray("d", 2))

    def __getitem__(self, index: int) -> Tensor:
        return super().__getitem__(index) * self.level.value + self.view[0] + self.table[0]


def test_a_worker_leaves_shared_memory_as_it_is() -> None:
    data = Shared()
    exact = ExactLoader(DataLoader(data, batch_size=2, num_workers=2), rng_state, set_rng_state)
    batches = iter(exact)
    take(batches, 1)
    data.level.value, data.view[0] = 2.0, 2.0  # workers see it at once
    data.table.fill_(2)
    take(batches, 5)  # more than the workers have loaded ahead by now
    place, drawn = exact.with_content(exact.state(), window=True), rng_state()
    expected = rest(batches)

    other = Shared()
    fresh = ExactLoader(DataLoader(other, batch_size=2, num_workers=2), rng_state, set_rng_state)
    fresh.rewind(place)
    assert (other.level.value, other.view[0], other.table.sum()) == (2, 2, 4)
    set_rng_state(drawn)
    assert rest(iter(fresh)) == expected  # all workers have begun
    assert (other.level.value, other.view[0], other.table.sum()) == (2, 2, 4)


def test_a_function_that_code_replaces_is_named() -> None:
    inexact = Inexact()
    exact = ExactLoader(DataLoader(Noisy(), batch_size=2), rng_state, set_rng_state, inexact.report)
    exact.with_content(exact.state(), window=True)
    assert not inexact.known
    exact.loader.collate_fn = list
    exact.with_content(exact.state(), window=True)
    assert [*inexact.known] == ["collate_fn of the loader"]


class OwnIteration(DataLoader[Tensor]):
    def __iter__(self) -> Any:
        yield from super().__iter__()


@pytest.mark.parametrize("persistent", [False, True])
def test_persistent_workers_of_a_class_with_its_own_iteration_are_named(persistent: bool) -> None:
    inexact = Inexact()
    made = OwnIteration(Noisy(), batch_size=2, num_workers=2, persistent_workers=persistent)
    exact = ExactLoader(made, rng_state, set_rng_state, inexact.report)
    rest(iter(exact))
    assert not inexact.known
    rest(iter(exact))
    assert ("the loader" in inexact.known) == persistent
    exact.close()
