"""A fault while Lightning makes new loaders in an epoch: all ranks make them again, or none has made them."""

import functools
import json
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import lightning as L
import pytest
import torch
from lightning.pytorch.demos.boring_classes import BoringModel
from lightning.pytorch.utilities import CombinedLoader
from torch import Tensor
from torch.utils.data import DataLoader, IterableDataset

from lightning_replica import ReplicaZeroStrategy
from tests.support import world
from tests.support.accelerators import accelerator
from tests.support.doubles import overriding
from tests.support.job import Case, Fault

COLLECTIVES = {"train_dataloader": 5, "val_dataloader": 3}  # in Lightning's functions that make loaders
PLACES = [
    f"{hook} {place}"
    for hook, count in COLLECTIVES.items()
    for place in ("before", *(f"collective {number}" for number in range(count)), "after")
]


@dataclass
class Loads(Case):
    """How the data is loaded: "kept" is a combined loader of the user's for each epoch."""

    data: Literal["new", "kept", "workers", "joined"] = "new"


class Stream(IterableDataset[Tensor]):
    """Has no length, and fewer samples on rank 1."""

    def __init__(self, samples: Tensor) -> None:
        self.samples = samples

    def __iter__(self) -> Iterator[Tensor]:
        return iter(self.samples[8 + 2 * int(os.environ["LOCAL_RANK"]) :])


class OfEpoch(BoringModel):
    """Has other data in each epoch, and each rank has its own."""

    seen: dict[str, list[float]]

    def __init__(self, case: Loads, out: Path) -> None:
        super().__init__()
        self._faults, self._out, self._data = case.faults, str(out), case.data
        self._kept: dict[str, CombinedLoader] = {}
        modes: tuple[tuple[Any, str], ...] = (("max_size_cycle", "train_dataloader"), ("sequential", "val_dataloader"))
        for mode, hook in modes:
            for epoch in range(3) if case.data == "kept" else ():
                self._kept[f"{hook} {epoch}"] = CombinedLoader(DataLoader(self.samples(epoch), 2), mode)
        self.seen = {"train": [], "val": []}

    def reach(self, point: str) -> None:
        for number, fault in enumerate(self._faults):
            fault.reach(point, self.trainer.global_step, Path(self._out, f"fired{number}"))

    def loader(self, hook: str) -> Any:
        self.reach(f"{hook} before")
        name = f"{hook} {self.trainer.current_epoch}"
        if name in self._kept:
            return self._kept[name]
        samples = self.samples(self.trainer.current_epoch)
        if self._data == "joined" and hook == "train_dataloader":
            return DataLoader(Stream(samples), batch_size=2)
        return DataLoader(samples, batch_size=2, num_workers=int(self._data == "workers"))

    def samples(self, epoch: int) -> Any:
        return torch.randn(16, 32) * (1 + epoch)

    def train_dataloader(self) -> Any:
        return self.loader("train_dataloader")

    def val_dataloader(self) -> Any:
        return self.loader("val_dataloader")

    def training_step(self, batch: Tensor, batch_idx: int) -> Any:
        self.seen["train"].append(float(batch.sum() * torch.rand(())))
        return super().training_step(batch, batch_idx)

    def validation_step(self, batch: Tensor, batch_idx: int) -> Any:
        if not self.trainer.sanity_checking:
            self.seen["val"].append(float(batch.sum()))
        self.reach("val_dataloader after")
        return super().validation_step(batch, batch_idx)

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        self.reach("train_dataloader after")


@overriding(new=("hook", "count", "_reach_collective"))
class Reaches(ReplicaZeroStrategy):
    """Reaches points inside the functions of Lightning that make loaders: those before each collective."""

    hook, count = "", 0

    def barrier(self, name: str | None = None) -> None:
        self.hook, self.count = (name or "").removesuffix("()"), 0
        self._reach_collective()
        super().barrier(name)

    def reduce(self, *args: Any, **options: Any) -> Any:
        self._reach_collective()
        return super().reduce(*args, **options)

    def all_gather(self, *args: Any, **options: Any) -> Any:
        self._reach_collective()
        return super().all_gather(*args, **options)

    def _reach_collective(self) -> None:
        module: Any = self.lightning_module
        if self.count < COLLECTIVES.get(self.hook, 0) and self._training is not None:
            module.reach(f"{self.hook} collective {self.count}")
            self.count += 1


def train(case: Loads, out: Path) -> None:
    torch.set_num_threads(1)
    L.seed_everything(2, verbose=False)
    torch.manual_seed(int(os.environ["LOCAL_RANK"]))
    model = OfEpoch(case, out)
    trainer = L.Trainer(
        strategy=Reaches(
            hang_min_s=case.hang[0], hang_max_s=case.hang[1], uneven_inputs="join" if case.data == "joined" else None
        ),
        accelerator=accelerator(),
        devices=2,
        max_epochs=3,
        reload_dataloaders_every_n_epochs=1,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(model)
    found = {**model.seen, **{name: tensor.tolist() for name, tensor in model.state_dict().items()}}
    (out / f"rank{trainer.global_rank}.json").write_text(json.dumps(found))


Untouched = Callable[[Any], world.Outcome]


@pytest.fixture(scope="module")
def untouched(tmp_path_factory: pytest.TempPathFactory) -> Untouched:
    @functools.cache
    def run(data: Any) -> world.Outcome:
        outcome = world.run(Loads(devices=2, data=data), tmp_path_factory.mktemp("untouched"), target=train)
        assert outcome.code == 0, outcome.logs
        for rank in outcome.ranks:
            assert len(set(rank["train"])) == len(rank["train"])
        return outcome

    return run


CASES = [
    *(("new", kind, place) for kind in ("kill", "exception") for place in PLACES),
    *((data, "exception", f"train_dataloader collective {n}") for data in ("kept", "workers") for n in (2, 4)),
    *(("joined", "exception", f"train_dataloader collective {n}") for n in range(3)),
    *(("joined", "kill", f"train_dataloader collective {n}") for n in (1, 2)),
]


@pytest.mark.parametrize(("data", "kind", "place"), CASES)
def test_all_ranks_have_the_same_loaders_again(
    data: Any, kind: str, place: str, untouched: Untouched, tmp_path: Path
) -> None:
    """One rank fails in the second epoch, and the other in the third."""
    later = 4 * place.startswith("val")
    faults = [Fault(kind, rank, place, step + later) for rank, step in ((1, 4), (0, 8))]
    outcome = world.run(Loads(tuple(faults), devices=2, data=data), tmp_path, target=train)
    outcome.assert_same(untouched(data))
    assert [number for number in (0, 1) if not (tmp_path / f"fired{number}").exists()] == []


def refused(case: Case, out: Path) -> None:
    """The first set-up fails: ranks have different numbers of batches."""
    rank = int(os.environ["LOCAL_RANK"])
    samples: Any = torch.ones(4 + 4 * rank, 32)
    combined = CombinedLoader(DataLoader(samples, batch_size=2), "max_size_cycle")
    trainer = L.Trainer(
        strategy=ReplicaZeroStrategy(),
        accelerator=accelerator(),
        devices=2,
        use_distributed_sampler=False,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    try:
        trainer.fit(BoringModel(), combined)
    finally:
        found = [type(combined).__name__, *(type(loader).__name__ for loader in combined.flattened)]
        (out / f"rank{rank}.json").write_text(json.dumps({"left": found}))


def test_a_combined_loader_of_the_user_is_left_as_it_was(tmp_path: Path) -> None:
    outcome = world.run(Case(devices=2), tmp_path, target=refused)
    assert outcome.code != 0
    assert "ConfigurationError" in outcome.logs
    assert outcome.ranks == [{"left": ["CombinedLoader", "DataLoader"]}] * 2, outcome.logs
