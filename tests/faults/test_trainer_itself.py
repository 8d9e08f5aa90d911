"""After a fault, Lightning's trainer and its loops are as in the untouched run, whatever they consist of."""

import enum
import json
import os
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
from lightning.pytorch.callbacks import Callback

from tests.support import job, world
from tests.support.job import Case, Fault

PLAIN = (bool, int, float, str, type(None), enum.Enum)
OF_OTHERS = {"profiler", "strategy", "callbacks", "loggers", "_lightning_module", "datamodule"}
# Times; what each call makes anew, and what is only there once something has been done in this process.
DIFFERS = re.compile(r"_last_val_time|\.closure|val_loop\._results|val_loop\._data_fetcher|metrics_known")


def plain_of(owner: Any, path: str, seen: set[int]) -> Iterator[tuple[str, str]]:
    """Everything plain that an object of Lightning leads to through others of Lightning, by its path."""
    if id(owner) in seen:
        return
    seen.add(id(owner))
    items = (
        owner.items() if isinstance(owner, Mapping) else enumerate(owner) if isinstance(owner, list | tuple) else None
    )
    for name, value in vars(owner).items() if items is None else items:
        here = f"{path}.{name}"
        if isinstance(value, PLAIN):
            yield here, repr(value)
        elif name not in OF_OTHERS and (
            isinstance(value, dict | list | tuple)
            or type(value).__module__.startswith(("lightning.pytorch.loops", "lightning.pytorch.trainer"))
            or type(value).__module__.startswith("lightning_replica.trainer.fit_loop")
        ):
            yield from plain_of(value, here, seen)


class Looks(Callback):
    """Writes down what the trainer consists of at each place of each step; of a step that is done again, the last."""

    def __init__(self) -> None:
        self.found: dict[str, dict[str, str]] = {}

    def look(self, trainer: Any, place: str) -> None:
        self.found[f"{place} {trainer.global_step}"] = dict(plain_of(trainer, "trainer", set()))

    def on_train_epoch_start(self, trainer: Any, pl_module: Any) -> None:
        self.look(trainer, "epoch start")

    def on_train_batch_start(self, trainer: Any, *_: Any) -> None:
        self.look(trainer, "batch start")

    def on_train_batch_end(self, trainer: Any, *_: Any) -> None:
        self.look(trainer, "batch end")

    def on_validation_start(self, trainer: Any, pl_module: Any) -> None:
        self.look(trainer, "validation start")

    def on_validation_batch_start(self, trainer: Any, *_: Any) -> None:
        self.look(trainer, "validation")

    def on_validation_end(self, trainer: Any, pl_module: Any) -> None:
        self.look(trainer, "validation end")

    def on_train_epoch_end(self, trainer: Any, pl_module: Any) -> None:
        self.look(trainer, "epoch end")


def train(case: Case, out: Path) -> None:
    looks = Looks()
    job.run(case, out, (looks,))
    (out / f"looks{os.environ['LOCAL_RANK']}").write_text(json.dumps(looks.found))


def found(case: Case, out: Path) -> list[dict[str, dict[str, str]]]:
    outcome = world.run(case, out, max_restarts=10, target=train)
    assert outcome.code == 0, outcome.logs
    outcome.assert_in_step()
    return [json.loads((out / f"looks{rank}").read_text()) for rank in range(case.devices)]


@pytest.fixture(scope="module")
def untouched(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, dict[str, str]]]:
    places = found(Case(devices=2), tmp_path_factory.mktemp("untouched"))
    assert all(len(place) > 200 for rank in places for place in rank.values())
    return places


FAULTS = (("forward", 1), ("scheduler", 3), ("validation", None), ("epoch_end", None), ("gather", 5))


@pytest.mark.parametrize("kind", ["exception", "kill"])
def test_it_is_as_if_nothing_had_happened(
    kind: str, untouched: list[dict[str, dict[str, str]]], tmp_path: Path
) -> None:
    faults = tuple(Fault(kind, number % 2, point, step) for number, (point, step) in enumerate(FAULTS))
    places = found(Case(faults, devices=2), tmp_path)
    assert all((tmp_path / f"fired{number}").exists() for number in range(len(faults)))
    for got, expected in zip(places, untouched, strict=True):
        for place, attributes in got.items():
            differs = {
                name: (attributes.get(name), expected[place].get(name))
                for name in {*attributes, *expected[place]}
                if attributes.get(name) != expected[place].get(name) and not DIFFERS.search(name)
            }
            assert differs == {}, place
