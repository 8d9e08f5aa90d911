"""DataLoader workers that die, stop or raise: the run ends with the bits of the one that was left alone."""

import os
import signal
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, TensorDataset

from lightning_replica._compat.loading import end_workers
from lightning_replica.errors import WorkerDiedError
from lightning_replica.state.data import deaths
from tests.state.data import traps
from tests.state.data.traps import BATCHES, Plan, Trap
from tests.support import world

KINDS = ("kill", "segv", "bus", "exception", "hang")
LOADERS = [Plan(data=data, persistent=persistent) for data in ("map", "iterable") for persistent in (False, True)]
# Where: one death, three, at the last batch of an epoch, in a validation.
PLACES: dict[str, tuple[tuple[str, int, int], ...]] = {
    "one": (("train", 0, 3),),
    "three": (("train", 0, 1), ("train", 0, 4), ("train", 1, 2)),
    "last": (("train", 0, BATCHES - 1),),
    "validation": (("validation", 1, 1),),
}
SAMPLE = {
    ("kill", "map, 2 workers", "one"),
    ("kill", "iterable, 2 workers, persistent", "three"),
    ("kill", "map, 2 workers, persistent", "validation"),
    ("segv", "iterable, 2 workers", "last"),
    ("bus", "map, 2 workers, persistent", "last"),
    ("exception", "map, 2 workers", "validation"),
    ("exception", "iterable, 2 workers, persistent", "one"),
    ("hang", "map, 2 workers, persistent", "one"),
}
CASES = [
    pytest.param(
        kind,
        plan,
        place,
        id=f"{kind}, {plan}, {place}",
        marks=() if (kind, str(plan), place) in SAMPLE else pytest.mark.combinations,
    )
    for kind in KINDS
    for plan in LOADERS
    for place in PLACES
]


@pytest.fixture(scope="module")
def untouched(tmp_path_factory: pytest.TempPathFactory) -> Any:
    @cache
    def run(name: str) -> world.Outcome:
        plan = next(plan for plan in [*LOADERS, *WITHOUT] if str(plan) == name)
        outcome = world.run(plan, tmp_path_factory.mktemp("untouched"), target=traps.train)
        assert (outcome.code, outcome.said) == (0, []), outcome.logs
        assert "recovered" not in outcome.logs
        return outcome

    return run


def is_gone(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] in "ZX"
    except OSError:
        return True


@pytest.mark.parametrize(("kind", "plan", "place"), CASES)
def test_a_worker_fails(kind: str, plan: Plan, place: str, untouched: Any, tmp_path: Path) -> None:
    laid = tuple(Trap(kind, *where) for where in PLACES[place])
    hang = (3.0, 6.0) if kind == "hang" else plan.hang
    outcome = world.run(replace(plan, traps=laid, hang=hang), tmp_path, target=traps.train)
    outcome.assert_same(untouched(str(plan)))
    sprung = [int((tmp_path / f"trap{number}").read_text()) for number in range(len(laid))]
    assert all(is_gone(pid) for pid in sprung)
    if kind == "hang":  # the rank hangs; its end is the end of its workers
        assert f"wait for process {sprung[0]}, which it has started and which a signal has stopped" in outcome.said[0]
        # Workers load ahead: two of a rank may stop at once.
        assert 1 <= len([line for line in outcome.said if "takes its place" in line]) <= len(laid), outcome.said
    else:
        assert outcome.said == []
        # What follows before a good step is told with it; before the first step a loader begins again by itself.
        told = outcome.logs.count("recovered at") + outcome.logs.count("Its loader starts again.")
        assert 1 <= told <= len(laid)


@pytest.mark.parametrize("plan", [LOADERS[1], LOADERS[2]], ids=str)
def test_workers_of_all_ranks_die_at_once(plan: Plan, untouched: Any, tmp_path: Path) -> None:
    """As where memory runs out: every rank's may, and no rank is to blame."""
    laid = tuple(Trap("kill", "train", 1, 2, rank) for rank in range(2))
    outcome = world.run(replace(plan, traps=laid), tmp_path, target=traps.train)
    outcome.assert_same(untouched(str(plan)))
    assert outcome.said == []
    assert all((tmp_path / f"trap{rank}").exists() for rank in range(2))
    assert "worker death: rank" in outcome.logs or "worker death and 1 more: rank" in outcome.logs
    assert "device error" not in outcome.logs


def test_a_stopped_worker_that_nobody_waits_for(tmp_path: Path) -> None:
    """It has loaded ahead, and training ends before: ranks end too."""
    plan = Plan(limits={"limit_train_batches": 3, "limit_val_batches": 0})
    expected = world.run(plan, tmp_path / "untouched", target=traps.train)
    trap = Trap("hang", "train", 1, 5, after=2)  # the last that is needed
    outcome = world.run(replace(plan, traps=(trap,)), tmp_path / "stopped", target=traps.train)
    outcome.assert_same(expected)
    assert outcome.said == []
    assert is_gone(int((tmp_path / "stopped" / "trap0").read_text()))


WITHOUT = [Plan(data=data, workers=0) for data in ("map", "iterable")]


@pytest.mark.parametrize("place", ["one", "validation"])
@pytest.mark.parametrize("plan", WITHOUT, ids=str)
def test_a_sample_that_cannot_be_read_without_workers(plan: Plan, place: str, untouched: Any, tmp_path: Path) -> None:
    laid = tuple(Trap("exception", *where) for where in PLACES[place])
    outcome = world.run(replace(plan, traps=laid), tmp_path, target=traps.train)
    outcome.assert_same(untouched(str(plan)))
    assert outcome.said == []
    assert (tmp_path / "trap0").exists()


def breaks(worker: int) -> None:
    if worker:
        os.kill(worker, signal.SIGKILL)
    raise ConnectionResetError


@pytest.mark.parametrize("dies", [True, False])
def test_a_connection_that_breaks(dies: bool) -> None:
    """To a worker that dies while the rank receives what it has sent; or to something else."""
    batches: Any = iter(DataLoader(TensorDataset(torch.arange(8)), num_workers=1))
    next(batches)
    deaths.hold()
    try:
        with pytest.raises(WorkerDiedError if dies else ConnectionResetError), deaths.loading():
            breaks(batches._workers[0].pid if dies else 0)
    finally:
        end_workers(batches)  # or torch's own handler raises the error once more, wherever this process is then
        deaths.release()
