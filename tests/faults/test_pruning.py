"""Pruning gives the model another structure while it trains; ranks that go back and ranks that are new follow it."""

import json
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from lightning.pytorch.callbacks import Callback, ModelPruning
from lightning.pytorch.demos.boring_classes import BoringModel
from torch import nn

from lightning_replica import ReplicaZeroStrategy
from tests.support import job, world
from tests.support.accelerators import accelerator
from tests.support.job import Case, Fault


class Prunes(ModelPruning):
    """Prunes all weights after every epoch: six steps, and six more."""

    def __init__(self, permanent: bool = True) -> None:
        super().__init__(
            "l1_unstructured",
            parameter_names=["weight"],
            amount=0.2,
            use_lottery_ticket_hypothesis=False,
            make_pruning_permanent=permanent,
        )


def train(case: Case, out: Path) -> None:
    job.run(case, out, (Prunes(),))


@pytest.fixture(scope="module")
def pruned(tmp_path_factory: pytest.TempPathFactory) -> world.Outcome:
    outcome = world.run(Case(devices=2), tmp_path_factory.mktemp("pruned"), target=train)
    assert outcome.code == 0, outcome.logs
    return outcome


@pytest.mark.parametrize(
    "fault",
    [
        pytest.param(Fault("kill", 0, "forward", 8), id="after the first pruning, rank 0"),
        pytest.param(Fault("kill", 1, "forward", 8), id="after the first pruning, rank 1"),
        pytest.param(Fault("kill", 1, "epoch_end", 6), id="while it prunes first"),
        pytest.param(Fault("kill", 0, "epoch_end", 12), id="while it prunes again"),
        pytest.param(Fault("kill", 1, "train_end", 12), id="while the pruning is made permanent"),
    ],
)
def test_a_rank_is_lost(fault: Fault, pruned: world.Outcome, tmp_path: Path) -> None:
    outcome = world.run(Case((fault,), devices=2), tmp_path, target=train)
    assert (tmp_path / "fired0").exists()
    outcome.assert_same(pruned)


class Reaches(Callback):
    def __init__(self, case: Case, out: Path) -> None:
        self.case, self.out = case, out

    def on_train_batch_start(self, trainer: Any, *args: Any) -> None:
        for fault in self.case.faults:
            fault.reach("batch", trainer.global_step, self.out / "fired0")


def train_twice(case: Case, out: Path) -> None:
    """Prunes in the first fit, and takes the masks into the second; one of the layers keeps the names that it has."""
    torch.set_num_threads(1)
    L.seed_everything(2, verbose=False)
    model: Any = BoringModel()
    model.layer = nn.Sequential(nn.Linear(32, 6), nn.Tanh(), nn.Linear(6, 2))
    model.layer[0].bias.requires_grad_(False)
    fits: list[Callback] = [Prunes(permanent=False), Reaches(case, out)]
    for callback in fits:
        trainer = L.Trainer(
            strategy=ReplicaZeroStrategy(bucket_bytes=64),
            accelerator=accelerator(),
            devices=2,
            max_epochs=1,
            limit_train_batches=6,
            limit_val_batches=1,
            callbacks=[callback],
            logger=False,
            enable_checkpointing=False,
            enable_progress_bar=False,
            enable_model_summary=False,
        )
        trainer.fit(model)
    weights = {name: tensor.tolist() for name, tensor in model.state_dict().items()}
    (out / f"rank{trainer.global_rank}.json").write_text(json.dumps(weights))


def test_a_rank_is_lost_in_a_later_fit(tmp_path: Path) -> None:
    untouched = world.run(Case(devices=2), tmp_path / "untouched", target=train_twice)
    assert "layer.0.weight_mask" in untouched.ranks[0], untouched.logs
    for rank in (0, 1):
        out = tmp_path / f"killed{rank}"
        outcome = world.run(Case((Fault("kill", rank, "batch", 3),), devices=2), out, target=train_twice)
        assert (out / "fired0").exists()
        outcome.assert_same(untouched)


class Grows(Callback):
    """Gives the model a parameter in training, which a replacement that runs the script again does not have."""

    def on_train_epoch_end(self, trainer: Any, pl_module: Any) -> None:
        if not hasattr(pl_module, "grown"):
            pl_module.register_parameter("grown", nn.Parameter(torch.zeros(3)))


def train_growing(case: Case, out: Path) -> None:
    job.run(case, out, (Grows(),))


def test_another_change_of_the_structure_is_named(tmp_path: Path) -> None:
    case = Case((Fault("kill", 1, "forward", 8),), devices=2)
    outcome = world.run(case, tmp_path, target=train_growing, max_restarts=1)
    assert outcome.code != 0
    assert "has changed in training" in outcome.logs, outcome.logs
    assert "'grown'" in outcome.logs
