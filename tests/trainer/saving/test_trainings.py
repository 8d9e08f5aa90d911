"""Whatever trains goes on from its last checkpoint to the last bit: the scenarios of tests/trainer, ended early."""

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from lightning_replica.checkpoint.directory import CheckpointDirectory
from lightning_replica.exit_codes import GASP_WRITTEN
from tests.faults.test_scenarios import Trained, fitting, points, results, train
from tests.support import world
from tests.support.job import Fault
from tests.trainer.both import different
from tests.trainer.scenarios import SCENARIOS


def killed(point: str, step: int | None, *ranks: int) -> tuple[Fault, ...]:
    return tuple(Fault("kill", rank, point, step) for rank in ranks or (1,))


def told(point: str, step: int | None) -> tuple[Fault, ...]:
    return (Fault("sigterm", 1, point, step),)


CASES = {
    "two optimizers, several updates a batch": Trained(killed("update", 2), name="gan", devices=2),
    "param groups": Trained(killed("gather", 9), name="group_rates", devices=2),
    "a loss scale that has shrunk": Trained(told("before_commit", 5), name="half_mixed", devices=2),
    "in the middle of a window": Trained(told("batch 4", 1), name="accumulation", devices=2),
    "lost in the middle of a window": Trained(killed("batch 5", 1), name="accumulation", devices=2),
    "data without length": Trained(killed("reduction", 3), name="stream", devices=2),
    "unfrozen by a callback": Trained(told("update", 6), name="finetuning", devices=2),
    "thawed before the fit begins": Trained(told("update", 6), name="thawed_at_the_start", devices=2),
    "averaged weights": Trained(killed("train_batch_end", 10), name="moving_average", devices=2),
    "three replicas, one is left": Trained(
        killed("after_commit", 2, 0, 2), name="plain", devices=3, options={"replicas": 3}
    ),
    "attributes": Trained(told("before_commit", 5), name="counters_and_lists", devices=2),
    "attributes, and a rank is lost": Trained(killed("train_batch_end", 5), name="counters_and_lists", devices=2),
    "a counter of the module's own": Trained(told("update", 4), name="steps_by_an_own_counter", devices=2),
    "whole parameters": Trained(
        killed("update", 3), name="dtypes_and_shapes", devices=4, options={"partition": "parameter"}
    ),
}


def assert_exact(case: Trained, out: Path, untouched: list[dict[str, Any]]) -> None:
    """Runs ``case`` to its early end, and goes on from what it has left."""
    ended = world.run(replace(case, gasp=True), out, max_restarts=0, target=train)
    assert ended.code == GASP_WRITTEN, f"{case}: {ended.code} {ended.said}\n{ended.logs}"
    assert (out / "fired0").exists(), f"{case} was not reached"
    left = CheckpointDirectory(out / "gasp").latest(verify=True)
    assert left.problems == ()
    outcome, ranks = results(replace(case, gasp=True, load=str(left.path)), out)
    for rank, (got, expected) in enumerate(zip(ranks, untouched, strict=True)):
        assert different(got, expected) == [], f"rank {rank} of {case}\n{outcome.logs}"


@pytest.mark.parametrize("name", CASES)
def test_a_sample(name: str, tmp_path: Path) -> None:
    case = CASES[name]
    _, untouched = results(replace(case, faults=()), tmp_path / "untouched")
    assert_exact(case, tmp_path / "run", untouched)


# The first makes no update in most batches, the second none through the strategy.
WITHOUT = {"manual_accumulation", "an_optimizer_in_an_optimizer", "found_rate"}
NAMES = [name for name in SCENARIOS if name not in WITHOUT]


def faults(name: str) -> Iterator[tuple[Fault, ...]]:
    """At every point; by turns a rank is killed, one is told to end, all raise."""
    for number, point in enumerate(points(name)):
        kind = ("kill", "sigterm", "exception")[number % 3]
        if (kind, point) == ("exception", "update"):  # a shard that is being changed is not saved
            kind = "kill"
        ranks = (0, 1) if kind == "exception" else (number % 2,)
        yield tuple(fitting(name, Fault(kind, rank, point, 1 + number % 3)) for rank in ranks)


@pytest.mark.combinations
@pytest.mark.timeout(600)
@pytest.mark.parametrize("name", NAMES)
def test_every_point(name: str, tmp_path: Path) -> None:
    case = Trained(name=name, devices=2)
    _, untouched = results(case, tmp_path / "untouched")
    for number, each in enumerate(faults(name)):
        assert_exact(replace(case, faults=each), tmp_path / str(number), untouched)


LAYOUTS: dict[str, dict[str, Any]] = {
    "3 replicas": {"devices": 3, "options": {"replicas": 3}},
    "whole parameters": {"devices": 4, "options": {"partition": "parameter"}},
    "through sockets": {"devices": 4, "options": {"shared_memory": False}},
}


@pytest.mark.combinations
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("name", NAMES)
def test_every_layout(name: str, layout: str, tmp_path: Path) -> None:
    """In the second update: of four ranks some make no more than four, and in the last it would be too late to ask."""
    case = Trained(name=name, **LAYOUTS[layout])
    _, untouched = results(case, tmp_path / "untouched")
    for kind in ("kill", "sigterm"):
        assert_exact(replace(case, faults=(Fault(kind, 1, "update", 1),)), tmp_path / kind, untouched)
