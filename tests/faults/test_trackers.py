"""A torchmetrics MetricTracker gives the module another submodule in every epoch: nobody may have one too many."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from lightning.pytorch.callbacks import Callback
from torchmetrics import MaxMetric, MeanMetric, MetricTracker

from lightning_replica.checkpoint.directory import CheckpointDirectory
from lightning_replica.exit_codes import GASP_WRITTEN
from tests.support import job, world
from tests.support.job import Case, Fault


class Tracks(Callback):
    """Six steps an epoch, two epochs."""

    def setup(self, trainer: Any, pl_module: Any, stage: str) -> None:
        pl_module.tracker = MetricTracker(MeanMetric(), maximize=False)

    def on_train_epoch_start(self, trainer: Any, pl_module: Any) -> None:
        pl_module.tracker.increment()

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, *args: Any) -> None:
        pl_module.tracker.update(outputs["loss"])

    def on_train_epoch_end(self, trainer: Any, pl_module: Any) -> None:
        values = pl_module.tracker.compute_all()
        pl_module.log_dict({"tracked": len(values), "first": values[0], "sum": values.sum()}, sync_dist=True)


class Measures(Callback):
    """Has come into the script since the checkpoint was written."""

    def setup(self, trainer: Any, pl_module: Any, stage: str) -> None:
        pl_module.largest = MaxMetric()


@dataclass
class Tracked(Case):
    devices: int = 2
    measures: bool = False


def train(case: Tracked, out: Path) -> None:
    job.run(case, out, (Tracks(), *([Measures()] if case.measures else ())))


@pytest.fixture(scope="module")
def untouched(tmp_path_factory: pytest.TempPathFactory) -> world.Outcome:
    outcome = world.run(Tracked(), tmp_path_factory.mktemp("tracked"), target=train)
    assert outcome.code == 0, outcome.logs
    assert outcome.ranks[0]["metrics"]["tracked"] == 2
    return outcome


@pytest.mark.parametrize(
    "fault",
    [
        pytest.param(Fault("kill", 0, "forward", 8), id="in the second epoch, rank 0"),
        pytest.param(Fault("kill", 1, "forward", 8), id="in the second epoch, rank 1"),
        pytest.param(Fault("kill", 1, "epoch_end", 6), id="between them, another goes back over it"),
        pytest.param(Fault("exception", 1, "epoch_end", 6), id="between them, nobody is lost"),
    ],
)
def test_a_rank_fails(fault: Fault, untouched: world.Outcome, tmp_path: Path) -> None:
    world.run(Tracked((fault,)), tmp_path, target=train).assert_same(untouched)
    assert (tmp_path / "fired0").exists()


def test_a_run_goes_on(untouched: world.Outcome, tmp_path: Path) -> None:
    case = Tracked((Fault("sigterm", 1, "forward", 8),), gasp=True)
    assert world.run(case, tmp_path, target=train).code == GASP_WRITTEN
    left = CheckpointDirectory(tmp_path / "gasp").latest()
    outcome = world.run(Tracked(gasp=True, load=str(left.path)), tmp_path, target=train)
    outcome.assert_same(untouched)
    changed = world.run(Tracked(gasp=True, load=str(left.path), measures=True), tmp_path, target=train)
    assert changed.code == 0, changed.logs
    assert changed.ranks[0]["weights"] == untouched.ranks[0]["weights"]
    assert changed.logs.count("submodules of the module differ from those in the checkpoint (largest)") == 2
