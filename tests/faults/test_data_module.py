"""A DataModule with state, which says so as one does for checkpoints."""

import json
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from lightning.pytorch.callbacks import Callback
from lightning.pytorch.demos.boring_classes import BoringDataModule, BoringModel
from torch import Tensor

from lightning_replica import ReplicaZeroStrategy
from tests.support import world
from tests.support.accelerators import accelerator
from tests.support.job import Case, Fault


class Curriculum(BoringDataModule):
    """Every batch is a little harder than the one before; how much depends on the rank."""

    def __init__(self) -> None:
        super().__init__()
        self.hardness = 0.0

    def on_after_batch_transfer(self, batch: Tensor, dataloader_idx: int) -> Tensor:
        if self.trainer is not None and self.trainer.training:
            self.hardness += 0.1 * (1 + self.trainer.global_rank)
        return batch * (1 + self.hardness)

    def state_dict(self) -> dict[str, Any]:
        return {"hardness": self.hardness}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.hardness = state_dict["hardness"]


class Reaches(Callback):
    def __init__(self, case: Case, out: Path) -> None:
        self.case, self.out = case, out

    def on_after_backward(self, trainer: Any, *args: Any) -> None:
        for fault in self.case.faults:
            fault.reach("backward", trainer.global_step, self.out / "fired0")


def train(case: Case, out: Path) -> None:
    torch.set_num_threads(1)
    L.seed_everything(2, verbose=False)
    model, data = BoringModel(), Curriculum()
    trainer = L.Trainer(
        strategy=ReplicaZeroStrategy(),
        accelerator=accelerator(),
        devices=2,
        max_epochs=2,
        limit_train_batches=6,
        limit_val_batches=1,
        callbacks=[Reaches(case, out)],
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(model, datamodule=data)
    found = {"hardness": data.hardness, **{name: tensor.tolist() for name, tensor in model.state_dict().items()}}
    (out / f"rank{trainer.global_rank}.json").write_text(json.dumps(found))


@pytest.fixture(scope="module")
def untouched(tmp_path_factory: pytest.TempPathFactory) -> world.Outcome:
    outcome = world.run(Case(devices=2), tmp_path_factory.mktemp("curriculum"), target=train)
    assert outcome.ranks[0]["hardness"] != outcome.ranks[1]["hardness"], outcome.logs
    return outcome


@pytest.mark.parametrize("fault", [Fault("kill", 0, "backward", 8), Fault("exception", 1, "backward", 8)], ids=str)
def test_it_goes_back(fault: Fault, untouched: world.Outcome, tmp_path: Path) -> None:
    outcome = world.run(Case((fault,), devices=2), tmp_path, target=train)
    assert (tmp_path / "fired0").exists()
    outcome.assert_same(untouched)
