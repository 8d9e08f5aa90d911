"""A run that goes on from its last checkpoint sees every batch once, whatever the data come from."""

import json
import os
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest
import torch

from lightning_replica import DyingGaspCheckpoint, ReplicaZeroStrategy
from lightning_replica.checkpoint.directory import CheckpointDirectory
from lightning_replica.exit_codes import GASP_WRITTEN
from tests.faults.test_scenarios import Reaches
from tests.state.data.training import BATCHES, DATA, Plan, train
from tests.support import world
from tests.support.job import Case, Fault

EPOCHS = 2


@dataclass
class Ended(Case):
    """A training of tests/state/data with faults."""

    devices: int = 2
    plan: Plan = field(default_factory=Plan)


def trains(case: Ended, out: Path) -> None:
    torch.set_num_threads(1)
    least, most = case.hang
    strategy = ReplicaZeroStrategy(bucket_bytes=128, guard="full", hang_min_s=least, hang_max_s=most)
    callbacks = (
        Reaches(case, strategy, out),
        *([DyingGaspCheckpoint(out / "gasp", case.grace_s)] if case.gasp else ()),
    )
    load = Path(case.load) if case.load else None
    result = train(case.plan, ckpt=load, devices=case.devices, strategy=strategy, callbacks=callbacks)
    (out / f"result{os.environ['LOCAL_RANK']}.json").write_text(json.dumps(result))


def results(case: Ended, out: Path) -> list[dict[str, Any]]:
    outcome = world.run(case, out, max_restarts=0, target=trains)
    assert outcome.code == 0, outcome.logs
    return [json.loads((out / f"result{rank}.json").read_text()) for rank in range(case.devices)]


def assert_every_batch_once(case: Ended, out: Path, untouched: list[dict[str, Any]]) -> None:
    """Runs ``case`` to its early end, and goes on: with what happens after that place, and to the same bits."""
    ended = world.run(replace(case, gasp=True), out, max_restarts=0, target=trains)
    assert ended.code == GASP_WRITTEN, f"{case}: {ended.code} {ended.said}\n{ended.logs}"
    left = CheckpointDirectory(out / "gasp").latest(verify=True)
    assert left.manifest is not None
    assert left.manifest.step is not None
    again = results(replace(case, gasp=True, load=str(left.path)), out)
    to_come = EPOCHS * BATCHES - case.plan.accumulate * left.manifest.step
    for rank, (got, whole) in enumerate(zip(again, untouched, strict=True)):
        rest = len(got["events"])
        assert [event[0] for event in got["events"]].count("batch") == to_come, (rank, case, got["events"])
        assert got["events"] == whole["events"][-rest:], (rank, case)
        assert {**got, "events": []} == {**whole, "events": []}, (rank, case)


SAMPLE = {
    "workers, in a window": Ended((Fault("sigterm", 1, "batch 3", 1),), plan=Plan("map workers", 2, val_check=3)),
    "stream in workers": Ended((Fault("kill", 0, "after_commit", 7),), plan=Plan("stream workers", val_check=3)),
}


@pytest.mark.parametrize("name", SAMPLE)
def test_a_sample(name: str, tmp_path: Path) -> None:
    case = SAMPLE[name]
    untouched = results(replace(case, faults=()), tmp_path / "untouched")
    assert_every_batch_once(case, tmp_path / "run", untouched)


POINTS = ["batch_start", "batch 3", "reduction", "before_commit", "update", "train_batch_end", "validation"]


@pytest.mark.combinations
@pytest.mark.timeout(600)
@pytest.mark.parametrize("accumulate", [1, 2])
@pytest.mark.parametrize("data", DATA)
def test_all_data(data: str, accumulate: int, tmp_path: Path) -> None:
    """At every point; by turns a rank is killed, one is told to end, all raise."""
    case = Ended(plan=Plan(data, accumulate, val_check=3))
    untouched = results(case, tmp_path / "untouched")
    for number, point in enumerate(POINTS):
        kind = ("exception", "kill", "sigterm")[number % 3]
        step = {"batch 3": 3 // accumulate, "validation": 6 // accumulate}.get(point, 1 + number % 3)
        ranks = (0, 1) if kind == "exception" else (number % 2,)
        faults = tuple(Fault(kind, rank, point, step) for rank in ranks)
        assert_every_batch_once(replace(case, faults=faults), tmp_path / str(number), untouched)
