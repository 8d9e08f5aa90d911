"""Faults of every kind, on every coordinate: the bits are those of the untouched run."""

import functools
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.megatron import job
from tests.megatron.job import Case
from tests.support import world
from tests.support.job import HANG, Fault
from tests.support.world import Outcome

Untouched = Callable[..., Outcome]


@pytest.fixture(scope="module")
def untouched(tmp_path_factory: pytest.TempPathFactory) -> Untouched:
    @functools.cache
    def find(name: str, **changes: Any) -> Outcome:
        case = replace(make(name), **changes)
        outcome = world.run(case, tmp_path_factory.mktemp("untouched"), target=job.run)
        assert outcome.code == 0, outcome.logs
        return outcome

    return find


# How the model is divided, and a rank of each kind: of each stage, each tensor rank, each group of experts.
WORLDS: dict[str, tuple[dict[str, Any], tuple[int, ...]]] = {
    "one": ({}, ()),
    "tp": ({"tensor": 2}, (0, 3)),
    "pp": ({"pipeline": 2, "reruns": True}, (1, 2)),
    "ep": ({"expert": 2, "biased": True}, (0, 3)),
    "vpp": ({"pipeline": 2, "virtual": 2, "accumulate": 2, "epochs": 2}, (0, 3)),
    "fp16": ({"tensor": 2, "scaled": True, "epochs": 2, "reruns": True}, (1, 2)),
    "tp-pp": ({"tensor": 2, "pipeline": 2, "uneven": True}, (1, 6)),
    "tp-ep": ({"tensor": 2, "expert": 2, "sequence": True}, (2, 5)),
}
KINDS = ("kill", "exception", "corrupt", "hang")
POINTS = ("forward", "backward", "before_commit", "update", "gather", "validation")
# Each kind, each point, each world and each rank at least once. All faults of a world strike one run, one after the
# other, each at its step. -m combinations strikes each of all alone.
SAMPLE: dict[str, tuple[tuple[str, str, int, int], ...]] = {
    "tp": (("exception", "before_commit", 0, 1), ("corrupt", "gather", 3, 3), ("kill", "forward", 3, 6)),
    "pp": (("kill", "backward", 2, 1), ("hang", "forward", 1, 3)),
    "ep": (("exception", "gather", 3, 1), ("corrupt", "before_commit", 3, 3), ("kill", "update", 0, 6)),
    "vpp": (("exception", "backward", 0, 0), ("kill", "validation", 3, 2)),
    "fp16": (("kill", "update", 2, 2), ("exception", "gather", 1, 5)),
    "tp-pp": (("kill", "backward", 6, 1), ("exception", "update", 1, 3)),
    "tp-ep": (("exception", "forward", 2, 1), ("kill", "gather", 5, 3)),
}


def make(name: str, *faults: Fault) -> Case:
    sizes = WORLDS[name][0]
    replicas = 2 * sizes.get("tensor", 1) * sizes.get("pipeline", 1) * sizes.get("expert", 1)
    hang = (1.0, 8.0) if any(fault.kind == "hang" for fault in faults) else HANG
    return Case(faults, devices=replicas, hang=hang, guard="full", **{"accumulate": 1, "epochs": 1, **sizes})


def cells() -> list[Any]:
    return [
        pytest.param(kind, point, name, rank, id=f"{kind}-{point}-{name}-{rank}")
        for kind in KINDS
        for point in POINTS
        for name, (_, ranks) in WORLDS.items()
        for rank in ranks
    ]


def test_the_sample_has_everything() -> None:
    sample = {(kind, point, name, rank) for name, faults in SAMPLE.items() for kind, point, rank, _ in faults}
    assert sample <= {tuple(cell.values) for cell in cells()}
    assert {kind for kind, *_ in sample} == set(KINDS)
    assert {point for _, point, *_ in sample} == set(POINTS)
    assert {(name, rank) for *_, name, rank in sample} == {(n, r) for n, (_, ranks) in WORLDS.items() for r in ranks}


@pytest.mark.parametrize("name", SAMPLE)
def test_one_fault_after_the_other(untouched: Untouched, tmp_path: Path, name: str) -> None:
    faults = [Fault(kind, rank, point, step) for kind, point, rank, step in SAMPLE[name]]
    changes: dict[str, Any] = {"epochs": 2} if len(faults) > 2 else {}
    outcome = world.run(replace(make(name, *faults), **changes), tmp_path, target=job.run)
    outcome.assert_same(untouched(name, **changes))
    assert [number for number in range(len(faults)) if not (tmp_path / f"fired{number}").exists()] == []
    assert outcome.logs.count("recovered at step") == len(faults), outcome.logs


@pytest.mark.combinations
@pytest.mark.parametrize(("kind", "point", "name", "rank"), cells())
def test_a_fault(untouched: Untouched, tmp_path: Path, kind: str, point: str, name: str, rank: int) -> None:
    outcome = world.run(make(name, Fault(kind, rank, point, 2)), tmp_path, target=job.run)
    if (kind, point) == ("corrupt", "update") and outcome.code != 0:  # R = 2 cannot tell who is right
        assert "none of them is known to be right" in outcome.logs
        return
    outcome.assert_same(untouched(name))
    if (kind, point) == ("corrupt", "update"):  # the bit was lost in the rounding of the update
        return
    assert any("recovered" in line for line in outcome.said + outcome.logs.splitlines())


@pytest.mark.parametrize(("name", "rank"), [("tp", 3), ("pp", 1)])
def test_a_worker_of_a_data_loader_dies(untouched: Untouched, tmp_path: Path, name: str, rank: int) -> None:
    """Tensor ranks and stages read the same batches, each with its own workers: the death is one rank's."""
    outcome = world.run(replace(make(name), workers=1, worker_dies=rank), tmp_path, target=job.run)
    outcome.assert_same(untouched(name))
    assert (tmp_path / "worker").exists()
    assert f"worker death: rank {rank}" in outcome.logs


def test_the_loss_scale(untouched: Untouched) -> None:
    """It grows, shrinks and grows again: what the faults of this world have to restore."""
    (scales, *others) = [found["scales"] for found in untouched("fp16").ranks]
    assert scales == [2.0**power for power in (18, 19, 19, 19, 18, 18, 19, 19)], "one infinity does not shrink it yet"
    assert others == [scales] * 3


def test_the_bias_of_experts(untouched: Untouched) -> None:
    """It moves, the same on all ranks of a stage: what the faults of this world have to restore."""
    (bias, *others) = [found["bias"] for found in untouched("ep").ranks]
    assert any(any(values) for values in bias)
    assert others == [bias] * 3


def test_a_fault_in_a_recovery(untouched: Untouched, tmp_path: Path) -> None:
    """A rank of another stage is lost in the same step."""
    faults = Fault("kill", 2, "backward", 2), Fault("kill", 0, "forward", 2)
    outcome = world.run(make("pp", *faults), tmp_path, target=job.run)
    outcome.assert_same(untouched("pp"))
    assert sum("died (SIGKILL)" in line for line in outcome.said) == 2


def test_all_holders_of_a_shard(tmp_path: Path) -> None:
    """What is lost is named by its coordinate."""
    faults = Fault("kill", 1, "forward", 2), Fault("kill", 3, "forward", 2)
    outcome = world.run(make("tp", *faults), tmp_path, target=job.run)
    assert outcome.code != 0
    assert "of tensor rank 1 of stage 0" in "\n".join((*outcome.said, outcome.logs))
