"""Ranks that are replaced in the middle of an epoch, and resumed runs in which that happens: to the last bit."""

import json
import os
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from lightning.pytorch.callbacks import Callback

from lightning_replica.core.points import listen
from tests.state.data.training import Plan, train
from tests.support import world
from tests.support.job import Case, Fault

PLANS = {
    "map workers": Plan("map workers", accumulate=2, val_check=3, every=2),
    "map persistent": Plan("map persistent", every=4),
    "stream": Plan("stream", val_check=4, every=4),
    "stream workers": Plan("stream workers", accumulate=2, every=2),
    "two loaders": Plan("two loaders", every=4),
    "own order": Plan("own order", every=4),
    "own loader": Plan("own loader", every=4),
    "near": Plan("near", every=4),
    "near workers": Plan("near workers", accumulate=2, every=2),
    "fresh": Plan("fresh", reload=1, every=4),
}


class Fails(Callback):
    """Each fault comes at a number of steps of the whole training; ``marker`` and its number say that it has."""

    def __init__(self, faults: tuple[Fault, ...], marker: Path) -> None:
        self.faults, self.marker = faults, marker

    def reach(self, point: str, step: int) -> None:
        for number, fault in enumerate(self.faults):
            fault.reach(point, step, self.marker.with_suffix(f".{number}"))

    def on_fit_start(self, trainer: L.Trainer, pl_module: Any) -> None:
        listen(lambda point: self.reach(point, trainer.global_step))

    def on_train_batch_end(self, trainer: L.Trainer, *args: Any) -> None:
        self.reach("train_batch_end", trainer.global_step)

    def on_train_epoch_end(self, trainer: L.Trainer, pl_module: Any) -> None:
        self.reach("epoch_end", trainer.global_step)


def run(case: Any, out: Path) -> None:
    """The training with its faults, from the beginning or from a checkpoint; then, in peace, what else there is."""
    torch.set_num_threads(1)
    rank = os.environ["LOCAL_RANK"]
    for name, plan, ckpt, *faults in case.trainings:
        fails = (Fails(tuple(faults), out / f"{name}.fired"),) if faults else ()
        result = train(plan, out / name if ckpt is None else None, ckpt, callbacks=fails)
        (out / f"{name}.{rank}.json").write_text(json.dumps(result))


def start(trainings: list[Any], out: Path) -> world.Outcome:
    case = Case(devices=2)
    case.trainings = trainings  # type: ignore[attr-defined]
    outcome = world.run(case, out, max_restarts=10, target=run)
    assert outcome.code == 0, outcome.logs
    return outcome


def result(out: Path, name: str, rank: int) -> Any:
    got = json.loads((out / f"{name}.{rank}.json").read_text())
    got["batches"] = {tuple(event) for event in got.pop("events") if event[0] == "batch"}
    return got


@pytest.fixture(scope="module")
def untouched(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("untouched")
    start([(name, plan, None) for name, plan in PLANS.items()], out)
    return out


def check_same(name: str, out: Path, untouched: Path) -> None:
    for rank in range(2):
        expected, got = result(untouched, name, rank), result(out, name, rank)
        assert got.pop("batches") <= expected.pop("batches")  # a replacement's events begin where it does
        assert got == expected, f"{name} on rank {rank}"


FAULTS = {
    "map workers": (Fault("kill", 0, "train_batch_end", 2), Fault("kill", 1, "before_commit", 5)),
    "map persistent": (Fault("kill", 1, "batch_start", 9),),
    "stream": (
        Fault("exception", 1, "batch_start", 3),
        Fault("kill", 0, "batch_start", 4),
        Fault("kill", 1, "train_batch_end", 9),
    ),
    "stream workers": (Fault("kill", 0, "epoch_end", 3), Fault("kill", 1, "before_commit", 4)),
    "two loaders": (Fault("kill", 1, "batch_start", 4),),
    "own order": (
        Fault("kill", 1, "batch_start", 3),
        Fault("kill", 1, "epoch_end", 6),
        Fault("kill", 0, "before_commit", 9),
    ),
    "own loader": (
        Fault("exception", 0, "batch_start", 3),
        Fault("kill", 1, "epoch_end", 6),
        Fault("kill", 0, "before_commit", 9),
    ),
    "near": (
        Fault("exception", 0, "train_batch_end", 2),
        Fault("kill", 0, "batch_start", 4),
        Fault("exception", 1, "before_commit", 9),
        Fault("kill", 1, "before_commit", 10),
    ),
    "near workers": (
        Fault("kill", 0, "train_batch_end", 2),
        Fault("exception", 1, "before_commit", 4),
        Fault("kill", 1, "before_commit", 5),
    ),
    "fresh": (
        Fault("kill", 1, "before_commit", 2),
        Fault("kill", 1, "epoch_end", 6),
        Fault("kill", 1, "batch_start", 6),
        Fault("kill", 0, "before_commit", 9),
    ),
}


@pytest.mark.parametrize("name", FAULTS)
def test_a_replaced_rank_reads_the_same_data(name: str, untouched: Path, tmp_path: Path) -> None:
    """Each time, in a training of several faults."""
    outcome = start([(name, PLANS[name], None, *FAULTS[name])], tmp_path)
    assert all((tmp_path / f"{name}.{number}").exists() for number in range(len(FAULTS[name])))
    assert len(outcome.said) == sum(fault.kind == "kill" for fault in FAULTS[name])
    assert "of the loader" not in outcome.logs  # nothing is named that does go back
    check_same(name, tmp_path, untouched)


@pytest.mark.parametrize(
    ("name", "step"), [("map workers", 2), ("near", 4), ("near workers", 4), ("stream", 4), ("stream workers", 4)]
)
def test_a_rank_is_replaced_in_a_resumed_run(name: str, step: int, untouched: Path, tmp_path: Path) -> None:
    """Before the first step that it makes: it goes on where the checkpoint says."""
    fault = Fault("kill", 1, "batch_start", step)
    outcome = start([(name, PLANS[name], untouched / name / f"batch-step={step}.ckpt", fault)], tmp_path)
    assert len(outcome.said) == 1
    check_same(name, tmp_path, untouched)


def test_a_checkpoint_that_was_written_after_a_rank_was_replaced(untouched: Path, tmp_path: Path) -> None:
    start([("stream", PLANS["stream"], None, Fault("kill", 1, "batch_start", 6))], tmp_path / "first")
    ckpt = tmp_path / "first" / "stream" / "batch-step=8.ckpt"
    start([("stream", PLANS["stream"], ckpt)], tmp_path)
    check_same("stream", tmp_path, untouched)
