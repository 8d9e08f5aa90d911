"""recovery=False: the same training, the same bits, and a fault ends it as it would under DDP."""

import re
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint

from lightning_replica import ReplicaZeroStrategy
from lightning_replica.recovery.mirror import Mirrors
from lightning_replica.state.host_state import LightningHostState
from tests.callbacks.training import Hooked, train
from tests.support import job, world
from tests.support.doubles import put
from tests.support.job import Case, Fault


def never(*_: Any) -> Any:
    raise AssertionError("nothing is kept for a recovery that will not come")


def off(case: Case, out: Path) -> None:
    for cls, names in ((LightningHostState, ["begin_window", "enter_commit"]), (Mirrors, ["begin", "settle"])):
        for name in names:
            put(cls, name, never)
    job.run(case, out, recovery=False)


def test_the_same_bits(tmp_path: Path) -> None:
    on = world.run(Case(), tmp_path / "on")
    outcome = world.run(Case(), tmp_path / "off", target=off, recovery=False)
    outcome.assert_same(on)


@pytest.mark.parametrize(("kind", "code"), [("exception", 1), ("kill", 128 + 9)])
def test_the_first_fault_ends_the_run(kind: str, code: int, tmp_path: Path) -> None:
    case = Hooked(faults=(Fault(kind, 1, "backward", 2),), recovery=False, devices=2)
    outcome = world.run(case, tmp_path, target=train, recovery=False)
    assert outcome.code == code, outcome.logs
    raised = rf"ended with Injected: at backward of step 2 \({re.escape(job.__file__)}:\d+\)"
    how = r"died \(SIGKILL\)" if kind == "kill" else raised
    assert len(outcome.said) == 1
    assert re.fullmatch(rf"Rank 1 {how}\. With recovery=False, this ends the run\.", outcome.said[0]), outcome.said
    assert outcome.logs.count("tests.support.job.Injected: at backward of step 2") == (kind == "exception")
    assert not list(tmp_path.glob("hooks*"))
    assert not (tmp_path / "recovery.jsonl").exists()
    assert outcome.ranks == [{}, {}]


class Saving(L.Callback):
    """Saves in the middle of a window, and at a window's end."""

    def __init__(self, out: Path) -> None:
        self.out = out

    def on_train_batch_end(self, trainer: L.Trainer, *_: Any) -> None:
        batches = trainer.fit_loop.epoch_loop.total_batch_idx + 1
        if batches in (3, 4):
            trainer.save_checkpoint(self.out / f"{batches}.ckpt")


class Plain(L.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.net = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Linear(8, 1))

    def training_step(self, batch: Any, _: int) -> torch.Tensor:
        loss: torch.Tensor = self.net(batch[0]).square().mean()
        return loss

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), lr=1e-2)


def resumed(case: Case, out: Path) -> None:
    """Trains, then goes on from each checkpoint; ends with the same weights."""
    torch.set_num_threads(1)
    weights = []
    for path in (None, out / "3.ckpt", out / "4.ckpt"):
        L.seed_everything(2, verbose=False)
        module = Plain()
        data = torch.utils.data.TensorDataset(torch.randn(64, 4))
        trainer = L.Trainer(
            strategy=ReplicaZeroStrategy(recovery=False),
            accelerator="cpu",
            devices=case.devices,
            max_epochs=1,
            accumulate_grad_batches=2,
            callbacks=[Saving(out)] if path is None else [],
            logger=False,
            enable_checkpointing=False,
            enable_progress_bar=False,
            enable_model_summary=False,
        )
        loader = torch.utils.data.DataLoader(data, batch_size=4, shuffle=True)
        trainer.fit(module, loader, ckpt_path=path, weights_only=None if path is None else True)
        weights.append(torch.cat([p.detach().flatten() for p in module.parameters()]))
    assert torch.equal(weights[0], weights[1])
    assert torch.equal(weights[0], weights[2])


def trained_twice(case: Case, out: Path) -> None:
    """Writes a checkpoint of the same name in each of two trainings."""
    for _ in range(2):
        torch.manual_seed(1)
        trainer = L.Trainer(
            strategy=ReplicaZeroStrategy(recovery=False),
            accelerator="cpu",
            devices=case.devices,
            max_epochs=1,
            callbacks=[ModelCheckpoint(out / "kept", filename="last")],
            logger=False,
            enable_progress_bar=False,
            enable_model_summary=False,
        )
        data = torch.utils.data.TensorDataset(torch.randn(16, 4))
        trainer.fit(Plain(), torch.utils.data.DataLoader(data, batch_size=4))


def test_checkpoints_of_an_earlier_training_stay(tmp_path: Path) -> None:
    outcome = world.run(Case(devices=2), tmp_path, target=trained_twice, recovery=False)
    assert outcome.code == 0, outcome.logs
    assert {path.name for path in (tmp_path / "kept").iterdir()} == {"last.ckpt", "last-v1.ckpt"}


def test_checkpoints_without_snapshots(tmp_path: Path) -> None:
    outcome = world.run(Case(devices=2), tmp_path, target=resumed, recovery=False)
    assert outcome.code == 0, outcome.logs
