"""A run that is resumed from any of its checkpoints goes on as if it had never stopped: to the last bit."""

import json
import os
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.state.data.training import DATA, Plan, train
from tests.support import world
from tests.support.job import Case

SAMPLE = {
    "map": Plan(),
    "validations within": Plan(val_check=2, every=3),
    "steps": Plan("map in order", steps=9, val_check=3, estimates=True),
    "accumulation": Plan(accumulate=2, val_check=3, every=1),
    "workers": Plan("map workers", every=3, val_check=4),
    "stream": Plan("stream", steps=10, val_check=3),
    "stream in workers": Plan("stream workers", accumulate=2, every=3),
    "two loaders": Plan("two loaders", every=4),
}
FULL = {
    f"{data}, {accumulate}, {steps}, {val_check}, {estimates}": Plan(data, accumulate, steps, val_check, estimates, 1)
    for data in DATA
    for accumulate in (1, 2)
    for steps in (None, 5)
    for val_check in (1.0, 3)
    for estimates in ((False, True) if "stream" not in data else (False,))
    if not (data in ("stream", "stream workers") and val_check == 1.0 and accumulate == 2)
}


def straight(case: Any, out: Path) -> None:
    torch.set_num_threads(1)
    rank = os.environ["LOCAL_RANK"]
    for name, plan in case.plans.items():
        result = train(plan, out / name / "saved", devices=case.devices)
        (out / name / f"straight{rank}.json").write_text(json.dumps(result))


def resumed(case: Any, out: Path) -> None:
    torch.set_num_threads(1)
    rank = os.environ["LOCAL_RANK"]
    for name, plan in case.plans.items():
        for saved in sorted((out / name / "saved").glob("*.ckpt")):
            result = train(plan, ckpt=saved, devices=case.devices)
            (out / name / f"{saved.stem}.{rank}.json").write_text(json.dumps(result))


def run(plans: dict[str, Plan], out: Path, target: Any, devices: int = 2) -> None:
    case = Case(devices=devices)
    case.plans = plans  # type: ignore[attr-defined]
    outcome = world.run(case, out, target=target)
    assert outcome.code == 0, outcome.logs


def check(name: str, out: Path, devices: int = 2) -> set[str]:
    """Compares every resumed run with the one that went on; returns the kinds of checkpoints."""
    kinds = set()
    for saved in sorted((out / name / "saved").glob("*.ckpt")):
        kinds.add(saved.stem.split("-")[0])
        done = torch.load(saved, weights_only=True)["events"]
        for rank in range(devices):
            whole = json.loads((out / name / f"straight{rank}.json").read_text())
            got = json.loads((out / name / f"{saved.stem}.{rank}.json").read_text())
            if nothing_is_left(whole["events"][done:]):
                first = json.loads((out / name / "straight0.json").read_text())
                assert got["weights"] == first["weights"]  # of the buffers, a checkpoint's weights have rank 0's
                continue
            assert got.pop("events") == whole.pop("events")[done:], f"{name}: {saved.stem} on rank {rank}"
            assert got == whole, f"{name}: {saved.stem} on rank {rank}"
    return kinds


def nothing_is_left(events: list[Any]) -> bool:
    """The last epoch was over: Lightning does not begin a fit with nothing to train."""
    return all(event[0] in ("end", "log") for event in events)


def test_every_checkpoint_of_a_sample_of_trainings(tmp_path: Path) -> None:
    run(SAMPLE, tmp_path, straight)
    run(SAMPLE, tmp_path, resumed)
    kinds = {kind for name in SAMPLE for kind in check(name, tmp_path)}
    assert kinds == {"batch", "validation", "epoch"}


@pytest.mark.combinations
@pytest.mark.parametrize("data", DATA)
def test_every_checkpoint_of_all_combinations(data: str, tmp_path: Path) -> None:
    plans = {name: plan for name, plan in FULL.items() if plan.data == data}
    run(plans, tmp_path, straight)
    run(plans, tmp_path, resumed)
    for name in plans:
        check(name, tmp_path)
