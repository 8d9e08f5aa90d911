"""Checkpoints that another strategy has written, or that another number of ranks goes on from."""

import json
import os
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from lightning.pytorch.callbacks import Callback, ModelCheckpoint
from lightning.pytorch.strategies import DDPStrategy
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset

from lightning_replica import ReplicaZeroStrategy
from tests.state.data.training import leave
from tests.support import world
from tests.support.job import Case
from tests.support.ranks import free_port

SAMPLES = 48


class Numbered(Dataset[Tensor]):
    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, index: int) -> Tensor:
        return torch.tensor([index, *torch.arange(3).add(index).cos()], dtype=torch.float32)


class Quiet(L.LightningModule):
    """Nothing random but the order of the data, which a checkpoint of another strategy cannot hold."""

    def __init__(self, batch: int) -> None:
        super().__init__()
        self.net, self.batch = nn.Linear(3, 1), batch
        self.seen: list[list[Any]] = []

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        self.seen.append([self.trainer.current_epoch, batch_idx, batch[:, 0].tolist()])
        return (self.net(batch[:, 1:]) - batch[:, :1] / SAMPLES).square().mean()

    def validation_step(self, batch: Tensor, batch_idx: int) -> None:
        self.log("val", self.net(batch[:, 1:]).mean(), sync_dist=True)

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.AdamW(self.parameters(), lr=1e-2)
        plateau = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, patience=0)
        return [optimizer], [{"scheduler": plateau, "monitor": "val", "interval": "epoch"}]

    def train_dataloader(self) -> Any:
        return DataLoader(Numbered(), self.batch, shuffle=True)

    def val_dataloader(self) -> Any:
        return DataLoader(Numbered(), 8)


def fit(strategy: Any, devices: int, ckpt: Path | None = None, save_to: Path | None = None, **options: Any) -> Any:
    L.seed_everything(5, verbose=False)
    module = Quiet(options.pop("batch", 4))
    saving: list[Callback] = [
        ModelCheckpoint(save_to, "{step}", every_n_train_steps=1, save_top_k=-1),
        ModelCheckpoint(save_to, "epoch-{step}", save_on_train_epoch_end=True, save_top_k=-1),
    ]
    trainer = L.Trainer(
        strategy=strategy,
        accelerator="cpu",
        devices=devices,
        logger=False,
        callbacks=saving if save_to else [],
        enable_checkpointing=save_to is not None,
        enable_progress_bar=False,
        enable_model_summary=False,
        **{"max_epochs": 3, "val_check_interval": 2, **options},
    )
    trainer.fit(module, ckpt_path=ckpt)
    weights = torch.cat([p.detach().flatten() for p in module.parameters()]).tolist()
    return {"seen": module.seen, "weights": weights, "rate": trainer.optimizers[0].param_groups[0]["lr"]}


def ours() -> Any:
    return ReplicaZeroStrategy(bucket_bytes=64)


def across(case: Any, out: Path) -> None:
    """DDP, ours from each of its checkpoints, and DDP from one of ours."""
    torch.set_num_threads(1)
    rank = os.environ["LOCAL_RANK"]
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(case.port), NODE_RANK="0", WORLD_SIZE="2")
    found: dict[str, Any] = {"ddp": fit(DDPStrategy(), 2, save_to=out / "ddp")}
    leave()
    for step in (2, 3, 6, 7, 12):
        found[f"ours from {step}"] = fit(ours(), 2, out / "ddp" / f"step={step}.ckpt")
    found["ours from the end of an epoch"] = fit(ours(), 2, out / "ddp" / "epoch-step=6.ckpt")
    found["ours"] = fit(ours(), 2, save_to=out / "ours")
    (out / f"across{rank}.json").write_text(json.dumps(found))


def back(case: Any, out: Path) -> None:
    torch.set_num_threads(1)
    rank = os.environ["LOCAL_RANK"]
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(case.port), NODE_RANK="0", WORLD_SIZE="2")
    found = fit(DDPStrategy(), 2, out / "ours" / "step=12.ckpt", val_check_interval=1.0, limit_val_batches=0)
    leave()
    (out / f"back{rank}.json").write_text(json.dumps(found))


def test_from_ddp_and_back(tmp_path: Path) -> None:
    case = Case(devices=2)
    for target in (across, back):
        case.port = free_port()  # type: ignore[attr-defined]
        outcome = world.run(case, tmp_path, target=target)
        assert outcome.code == 0, outcome.logs
    for rank in range(2):
        found = json.loads((tmp_path / f"across{rank}.json").read_text())
        whole = found.pop("ddp")
        assert found["ours"] == whole
        for step in (2, 3, 6, 7, 12):
            got = found[f"ours from {step}"]
            assert got["seen"] == whole["seen"][step:], step
            assert (got["weights"], got["rate"]) == (whole["weights"], whole["rate"]), step
        # The plateau scheduler's metric is not in DDP's checkpoint; Lightning leaves that step out, too.
        assert found["ours from the end of an epoch"]["seen"] == whole["seen"][6:]
        assert json.loads((tmp_path / f"back{rank}.json").read_text())["seen"] == whole["seen"][12:]


def saves(case: Any, out: Path) -> None:
    torch.set_num_threads(1)
    found = fit(ours(), 2, save_to=out / "two", accumulate_grad_batches=case.window)
    (out / f"saves{os.environ['LOCAL_RANK']}.json").write_text(json.dumps(found))


def goes_on(case: Any, out: Path) -> None:
    torch.set_num_threads(1)
    options = {"accumulate_grad_batches": case.window, "batch": case.batch}
    found = fit(ours(), case.devices, out / "two" / f"step={case.step}.ckpt", **options)
    (out / f"on{os.environ['LOCAL_RANK']}.json").write_text(json.dumps(found))


@pytest.mark.parametrize(
    ("devices", "batch", "window", "step"), [(4, 4, 1, 3), (4, 2, 1, 3), (4, 2, 2, 1), (1, 4, 1, 3)]
)
def test_another_number_of_ranks_repeats_no_sample(
    devices: int, batch: int, window: int, step: int, tmp_path: Path
) -> None:
    for ranks, target in ((2, saves), (devices, goes_on)):
        case = Case(devices=ranks)
        case.batch, case.window, case.step = batch, window, step  # type: ignore[attr-defined]
        outcome = world.run(case, tmp_path, target=target)
        assert outcome.code == 0, outcome.logs
    before = [b for r in range(2) for b in json.loads((tmp_path / f"saves{r}.json").read_text())["seen"]]
    after = [b for r in range(devices) for b in json.loads((tmp_path / f"on{r}.json").read_text())["seen"]]
    used = {sample for epoch, number, samples in before if epoch == 0 and number < step * window for sample in samples}
    left = [sample for epoch, _, samples in after if epoch == 0 for sample in samples]
    assert len(used) == step * window * 2 * 4
    assert not used & set(left)
    assert len(used) + len(left) > SAMPLES - devices * batch * window  # less than one window is left out
    assert len([sample for epoch, _, samples in after if epoch == 1 for sample in samples]) == SAMPLES
