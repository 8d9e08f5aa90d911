"""A metric that is not reduced is another number on every rank; so is what schedulers and callbacks make of it."""

import json
import os
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
import torch.distributed as dist
from lightning.pytorch.callbacks import EarlyStopping, ModelCheckpoint
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from lightning_replica import ReplicaZeroStrategy
from tests.support import job, world
from tests.support.accelerators import accelerator
from tests.support.job import Case, Fault
from tests.support.trainers import callbacks_of

FOREVER = 100  # in epochs: ranks see different numbers, but come to the same decisions


class Model(job.Model):
    """Logs for every rank by itself; rank 1's validations get worse, rank 0's better."""

    def on_fit_start(self) -> None:
        alone = [dist.new_group([rank]) for rank in range(self.trainer.world_size)]
        self.pair, self.alone = dist.new_group([0, 1]), alone[self.global_rank]

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        output = super().training_step(batch, batch_idx)
        loss = output["loss"] * (1 + self.global_rank)
        for name, group in (("loss_of_pair", self.pair), ("loss_alone", self.alone)):
            self.log(name, loss, on_step=False, on_epoch=True, sync_dist=True, sync_dist_group=group)
        self.log("loss_of_rank", output["loss"] + self.global_rank, prog_bar=True)
        return output

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        loss = nn.functional.mse_loss(self(batch[0]), batch[1])
        self.log("val_of_rank", loss + 100 * self.global_rank * (1 + self.current_epoch))

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.AdamW(self.parameters(), lr=1e-2)
        plateau = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, patience=FOREVER)
        return [optimizer], [{"scheduler": plateau, "monitor": "val_of_rank"}]


class Extremes(L.Callback):
    """A callback of the user's, with all kinds of state."""

    def __init__(self) -> None:
        self.least: dict[int, Any] = {}
        self.loads = 0

    def on_train_batch_end(self, trainer: Any, *args: Any) -> None:
        seen = trainer.callback_metrics["loss_of_rank"]
        self.least[trainer.current_epoch] = (torch.minimum(seen, self.least.get(trainer.current_epoch, (seen,))[0]), 1)

    def state_dict(self) -> dict[str, Any]:
        return {"least": self.least}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.least, self.loads = state["least"], self.loads + 1  # what it sets besides belongs to a run that resumes


def train(case: Case, out: Path) -> None:
    torch.set_num_threads(1)
    L.seed_everything(7, verbose=False)
    faults = job.Faults(case, out)
    model = Model(faults)
    checkpoint = ModelCheckpoint(out / "best", monitor="val_of_rank", save_on_train_epoch_end=False)
    trainer = L.Trainer(
        strategy=ReplicaZeroStrategy(case.replicas, guard=case.guard, hang_min_s=20.0, hang_max_s=60.0),
        accelerator=accelerator(),
        devices=case.devices,
        max_epochs=3,
        callbacks=[faults, EarlyStopping("val_of_rank", patience=FOREVER), Extremes(), checkpoint],
        logger=job.Lines(faults),
        enable_progress_bar=False,
        enable_model_summary=False,
        log_every_n_steps=1,
    )
    x = torch.randn(60, 16)
    data = TensorDataset(x, x.square().sum(1, keepdim=True))
    trainer.fit(model, DataLoader(data, 5, shuffle=True), DataLoader(data, 10))
    rank = int(os.environ["LOCAL_RANK"])
    callbacks = {each.state_key: each.state_dict() for each in callbacks_of(trainer)}
    found = {
        "schedulers": trainer.lr_scheduler_configs[0].scheduler.state_dict(),
        "callbacks": callbacks,
        "current_score": checkpoint.current_score,
        "loads": [each.loads for each in callbacks_of(trainer) if isinstance(each, Extremes)],
        "metrics": [trainer.callback_metrics, trainer.logged_metrics, trainer.progress_bar_metrics],
        "weights": [parameter.detach() for parameter in model.parameters()],
    }
    (out / f"rank{rank}.json").write_text(json.dumps(found, default=shown).replace(str(out), "OUT"))


def shown(value: Tensor) -> list[Any]:
    return [str(value.dtype), value.tolist()]


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> world.Outcome:
    outcome = world.run(Case(devices=2), tmp_path_factory.mktemp("alone"), target=train)
    assert outcome.code == 0, outcome.logs
    first, second = outcome.ranks
    assert (first["schedulers"]["num_bad_epochs"], second["schedulers"]["num_bad_epochs"]) == (0, 2)
    assert first["weights"] == second["weights"]
    for part in ("callbacks", "current_score", "metrics"):
        assert first[part] != second[part], f"the ranks have the same {part}: nothing is tested"
    return outcome


FAULTS = {
    "rank 1 before the update": [Fault("kill", 1, "reduction", 14)],
    "rank 0 after it": [Fault("kill", 0, "after_commit", 14)],
    "rank 1 in a validation": [Fault("kill", 1, "validation", 12)],
    "rank 0 at the end of an epoch": [Fault("kill", 0, "epoch_end", 12)],
    "rank 1 and its replacement, then rank 0": [
        Fault("kill", 1, "reduction", 14),
        Fault("kill", 1, "reduction", 14),
        Fault("kill", 0, "before_commit", 14),
    ],
}


@pytest.mark.parametrize("faults", FAULTS.values(), ids=FAULTS)
def test_a_replacement_has_its_predecessors(faults: list[Fault], alone: world.Outcome, tmp_path: Path) -> None:
    outcome = world.run(Case(tuple(faults), devices=2), tmp_path / "run", target=train)
    outcome.assert_same(alone)
    assert all((tmp_path / "run" / f"fired{number}").exists() for number in range(len(faults))), outcome.logs
