"""What a script reads and draws under `replica_zero`, in all of its fits, is what it reads and draws under DDP."""

import json
import os
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from lightning.pytorch.strategies import DDPStrategy

from lightning_replica import ReplicaZeroStrategy
from tests.state.data import fits
from tests.state.data.fits import Plan
from tests.support import world
from tests.support.job import Case
from tests.support.ranks import free_port

WORKERS = ((0, False), (2, False), (2, True))
ONE = [
    Plan(data, workers, persistent, seed_workers=seeded, fits=1)
    for data in ("map", "own sampler", "random", "iterable", "combined", "two")
    for workers, persistent in WORKERS
    for seeded in (False, True)
]
TWO = [
    Plan(data, workers, persistent, same_loader=same_loader, same_trainer=same_trainer)
    for data in ("map", "own sampler", "iterable", "combined")
    for workers, persistent in WORKERS
    for same_loader in (True, False)
    for same_trainer in (True, False)
]
PEEKS = [Plan(data, workers, peeks=True, fits=1) for data in ("map", "iterable") for workers in (0, 2)]
CUT_SHORT = [
    Plan(data, workers, persistent, limit=3, generator=generator, fits=1)
    for data in ("map", "iterable")
    for workers, persistent in WORKERS
    for generator in (False, True)
]
SAMPLE = [
    Plan("map", 2, seed_workers=True, fits=1),
    Plan("iterable", 2, True, seed_workers=True, fits=1),
    Plan("map", 0, peeks=True, fits=1),
    Plan("own sampler", 2, same_trainer=True),
    Plan("iterable", 2, True, same_trainer=False),
    Plan("combined", 2, True, same_trainer=False),
    Plan("map", 2, True, limit=3, generator=True, fits=1),
]


def one_after_the_other(case: Any, out: Path) -> None:
    """All scripts under DDP, then all under `replica_zero`: in one process, for the sake of time."""
    torch.set_num_threads(1)
    rank = os.environ["LOCAL_RANK"]
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(case.port), NODE_RANK="0", WORLD_SIZE="2")
    ddp = [fits.run(plan, DDPStrategy) for plan in case.plans]
    dist.destroy_process_group()
    ours = [fits.run(plan, lambda: ReplicaZeroStrategy(bucket_bytes=128)) for plan in case.plans]
    (out / f"{rank}.json").write_text(json.dumps([ddp, ours]))


def check(plans: list[Plan], out: Path) -> None:
    case = Case(devices=2)
    case.plans, case.port = plans, free_port()  # type: ignore[attr-defined]
    outcome = world.run(case, out, target=one_after_the_other)
    assert (outcome.code, outcome.said) == (0, []), outcome.logs
    assert "recovered" not in outcome.logs
    for rank in range(2):
        ddp, ours = json.loads((out / f"{rank}.json").read_text())
        different = [str(plan) for plan, a, b in zip(plans, ddp, ours, strict=True) if a != b]
        assert different == [], f"rank {rank}"


def test_a_sample_of_scripts(tmp_path: Path) -> None:
    check(SAMPLE, tmp_path)
    ranks = [json.loads((tmp_path / f"{rank}.json").read_text())[1] for rank in range(2)]
    drawn = [[fit["noise"] for fit in fits_of_rank] for fits_of_rank in ranks]
    # With seed_everything(workers=True) ranks draw different augmentations, without it the same.
    for number, plan in enumerate(SAMPLE):
        if plan.workers and plan.data == "map":
            assert (drawn[0][number] != drawn[1][number]) == plan.seed_workers, str(plan)


ALL = {"one fit": ONE, "two fits": TWO, "cut short": CUT_SHORT, "peeks": PEEKS}


@pytest.mark.combinations
@pytest.mark.parametrize(
    "plans",
    [
        pytest.param(plans[number : number + 12], id=f"{name}, from {number}")
        for name, plans in ALL.items()
        for number in range(0, len(plans), 12)
    ],
)
def test_all_scripts(plans: list[Plan], tmp_path: Path) -> None:
    check(plans, tmp_path)
