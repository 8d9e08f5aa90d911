"""A last checkpoint of four ranks, gone on from with two: as DDP does from an export of it, within 1e-6."""

import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
import torch.distributed as dist
from lightning.pytorch.callbacks import Callback
from lightning.pytorch.strategies import DDPStrategy, Strategy
from torch.utils.data import DataLoader, DistributedSampler

from lightning_replica import DyingGaspCheckpoint, ReplicaZeroStrategy
from lightning_replica.checkpoint.directory import CheckpointDirectory
from lightning_replica.cli.main import main
from lightning_replica.exit_codes import GASP_WRITTEN
from tests.faults.test_scenarios import Reaches
from tests.support import world
from tests.support.job import Case, Fault
from tests.support.ranks import free_port
from tests.trainer import scenarios

SAMPLES, BATCH, WINDOW, EPOCHS = 128, 4, 2, 3


@dataclass
class Run(Case):
    """``skip`` samples of a rank are done of the epoch at which DDP begins."""

    ddp: bool = False
    skip: int = 0
    port: int = 0


class Rest(DistributedSampler[Any]):
    """Leaves out the first samples of its first epoch: Lightning's own resuming would begin it again."""

    def __init__(self, skip: int, dataset: Any) -> None:
        super().__init__(dataset, seed=7)
        self.skip = skip

    def __iter__(self) -> Iterator[Any]:
        skip, self.skip = self.skip, 0
        return iter(list(super().__iter__())[skip:])


class Net(scenarios.Net):
    def __init__(self, skip: int) -> None:
        super().__init__()
        self.skip = skip
        self.seen: list[list[float]] = []

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self.seen.append([self.trainer.current_epoch, batch_idx, *batch[1].flatten().tolist()])
        return super().training_step(batch, batch_idx)

    def configure_optimizers(self) -> Any:
        optimizer = super().configure_optimizers()
        return [optimizer], [{"scheduler": torch.optim.lr_scheduler.StepLR(optimizer, 3, 0.8), "interval": "step"}]

    def train_dataloader(self) -> Any:
        dataset = scenarios.data(SAMPLES).dataset
        return DataLoader(dataset, BATCH, sampler=Rest(self.skip, dataset))


def trains(case: Run, out: Path) -> None:
    torch.set_num_threads(1)
    rank = os.environ["LOCAL_RANK"]
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(case.port), NODE_RANK="0", WORLD_SIZE=str(case.devices))
    L.seed_everything(11, verbose=False)
    net, callbacks = Net(case.skip), list[Callback]()
    strategy: Strategy = DDPStrategy()
    if not case.ddp:
        strategy = ours = ReplicaZeroStrategy(bucket_bytes=512)
        callbacks = [Reaches(case, ours, out), DyingGaspCheckpoint(out / "gasp", case.grace_s)]
    trainer = L.Trainer(
        strategy=strategy,
        accelerator="cpu",
        devices=case.devices,
        max_epochs=EPOCHS,
        accumulate_grad_batches=WINDOW,
        callbacks=callbacks,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(net, ckpt_path=case.load or None)
    found = {"weights": net.state_dict(), "seen": net.seen, "rate": trainer.optimizers[0].param_groups[0]["lr"]}
    torch.save({**found, "steps": trainer.global_step}, out / f"{'ddp' if case.ddp else 'ours'}{rank}.pt")
    if case.ddp:
        dist.destroy_process_group()


# The last checkpoint's step, and how the run ended: before the second epoch's first batch, or within the first.
ENDS = {
    "between epochs": (4, Fault("sigterm", 2, "batch_start", 3)),
    "in a window": (2, Fault("kill", 1, "reduction", 2)),
    "in a tail": (2, Fault("kill", 1, "after_commit", 1)),
}


def for_two_ranks(exported: Path, in_tail: bool) -> int:
    """Changes the file as no other strategy does by itself; returns how many batches of the epoch are done.

    Two ranks need twice as many batches for the same samples. In a tail the scheduler's step was still to come.
    """
    checkpoint = torch.load(exported, weights_only=True)
    batches = checkpoint["loops"]["fit_loop"]["epoch_loop.batch_progress"]["current"]
    done = int(batches["processed"])
    batches.update({name: count + done for name, count in batches.items()})
    if in_tail:
        checkpoint["lr_schedulers"][0]["last_epoch"] += 1
    torch.save(checkpoint, exported)
    return 2 * done


@pytest.mark.parametrize("end", ENDS)
def test_two_ranks_go_on(end: str, tmp_path: Path) -> None:
    step, fault = ENDS[end]
    ended = world.run(Run((fault,), gasp=True), tmp_path, max_restarts=0, target=trains)
    assert ended.code == GASP_WRITTEN, ended.logs
    left, exported = CheckpointDirectory(tmp_path / "gasp"), tmp_path / "one.ckpt"
    assert left.latest().path == left.path_of(step)
    ours = world.run(Run(devices=2, gasp=True, load=str(left.path_of(step))), tmp_path, target=trains)
    assert ours.code == 0, ours.logs
    main(["export", str(left.path), str(exported)])
    begun = torch.load(exported, weights_only=True)["state_dict"]
    done = for_two_ranks(exported, end == "in a tail")
    case = Run(devices=2, load=str(exported), ddp=True, skip=done * BATCH, port=free_port())
    ddp = world.run(case, tmp_path, target=trains)
    assert ddp.code == 0, ddp.logs
    for rank in range(2):
        got, expected = (torch.load(tmp_path / f"{name}{rank}.pt", weights_only=True) for name in ("ours", "ddp"))
        assert got["seen"] == expected["seen"]
        assert len(got["seen"]) == EPOCHS * SAMPLES // BATCH // 2 - step * WINDOW * 2
        assert (got["rate"], got["steps"]) == (expected["rate"], expected["steps"])
        for name, weight in expected["weights"].items():
            assert float((got["weights"][name] - weight).abs().max()) < 1e-6, name
            assert float((begun[name] - weight).abs().max()) > 1e-3, name
