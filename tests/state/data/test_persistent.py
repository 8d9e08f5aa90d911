"""Ranks that are replaced while workers of theirs live longer than an epoch, or a validation."""

from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from tests.state.data import traps
from tests.state.data.traps import BATCHES, Plan
from tests.support import world
from tests.support.job import Fault

CUT = {"limit_train_batches": 4, "limit_val_batches": 3}
PLANS = {
    "map": Plan(persistent=True),
    "map, cut short": Plan(persistent=True, limits=CUT),
    "iterable": Plan(data="iterable", persistent=True),
    "iterable, cut short": Plan(data="iterable", persistent=True, limits=CUT),
    "iterable, generator": Plan(data="iterable", persistent=True, generator=True),
}
# Steps of the first epoch, of the second, and the first of the second: nothing of that epoch has been loaded.
STEPS = {"first epoch": 2, "start of the second": 0, "second epoch": 3}
SAMPLE = {
    ("map, cut short", "start of the second"),
    ("iterable", "second epoch"),
    ("iterable, cut short", "start of the second"),
}


@pytest.fixture(scope="module")
def untouched(tmp_path_factory: pytest.TempPathFactory) -> Any:
    @cache
    def run(name: str) -> world.Outcome:
        outcome = world.run(PLANS[name], tmp_path_factory.mktemp("untouched"), target=traps.train)
        assert (outcome.code, outcome.said) == (0, []), outcome.logs
        return outcome

    return run


@pytest.mark.parametrize(
    ("name", "when"),
    [
        pytest.param(name, when, marks=() if (name, when) in SAMPLE else pytest.mark.combinations)
        for name in PLANS
        for when in STEPS
    ],
)
def test_a_replaced_rank_goes_on_with_workers_like_those_of_the_lost(
    name: str, when: str, untouched: Any, tmp_path: Path
) -> None:
    plan = PLANS[name]
    step = STEPS[when] + plan.limits.get("limit_train_batches", BATCHES) * ("second" in when)
    fault = Fault("kill", 1, "batch_start" if step % 2 else "train_batch_start", step)
    outcome = world.run(replace(plan, faults=(fault,)), tmp_path, target=traps.train)
    outcome.assert_same(untouched(name))
    assert outcome.said == ["Rank 1 died (SIGKILL); a new process takes its place (1 of 3)."]
