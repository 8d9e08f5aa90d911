"""What Lightning's own tests of the DDP strategy (tests_pytorch/strategies/test_ddp*.py) say that users rely on."""

import json
import os
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
import torch.distributed as dist
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from lightning_replica import ReplicaZeroStrategy
from tests.support import world
from tests.support.job import Case
from tests.support.typed import tensor_of
from tests.trainer.scenarios import INPUTS, Net, data

CHECKS: dict[str, Callable[[Path], None]] = {}


def check(function: Callable[[Path], None]) -> Callable[[Path], None]:
    CHECKS[function.__name__] = function
    return function


def trainer(**options: Any) -> L.Trainer:
    quiet = {"logger": False, "enable_progress_bar": False, "enable_model_summary": False}
    defaults = {"strategy": "replica_zero", "accelerator": "cpu", "devices": 2, "max_epochs": 1}
    return L.Trainer(**{**quiet, "enable_checkpointing": False, **defaults, **options})


@check
def everything_without_a_fit(out: Path) -> None:
    net = Net()
    validated = trainer().validate(net, data(16), verbose=False)
    tested = trainer().test(net, data(16), verbose=False)
    assert validated[0]["val"] == tested[0]["test"]
    # Every rank predicts its part, and the ranks have the same weights although they were seeded apart.
    predicted = trainer().predict(net, data(16))
    assert predicted is not None
    assert sum(len(batch) for batch in predicted) == 8
    weights = [torch.empty_like(net.body.weight) for _ in range(2)]
    dist.all_gather(weights, net.body.weight.detach())
    assert torch.equal(*weights)


@check
def everything_after_a_fit(out: Path) -> None:
    net, saves = Net(), ModelCheckpoint(dirpath=out / "best", monitor="val", save_weights_only=False)
    lightning = trainer(callbacks=[saves], enable_checkpointing=True, max_epochs=2)
    lightning.fit(net)
    weights = {name: value.clone() for name, value in net.state_dict().items()}
    best = lightning.test(net, data(16), ckpt_path="best", verbose=False)
    assert saves.best_model_score is not None
    assert best[0]["test"] == float(saves.best_model_score)
    loaded = Net.load_from_checkpoint(saves.best_model_path)
    again = trainer().test(loaded, data(16), verbose=False)
    assert again == best
    net.load_state_dict(weights)
    assert lightning.predict(net, data(16)) is not None


@check
def fit_again_and_on(out: Path) -> None:
    """A second fit of the same trainer goes on, one of another trainer starts anew, with new optimizers."""
    net = Net()
    lightning = trainer()
    lightning.fit(net)
    lightning.fit_loop.max_epochs = 2
    lightning.fit(net)
    assert lightning.global_step == 16
    another = trainer()
    another.fit(net)
    assert another.global_step == 8


@check
def the_module_is_its_own_again_after_a_fit(out: Path) -> None:
    net = Net()
    trainer().fit(net)
    storages = {parameter.untyped_storage().data_ptr() for parameter in net.parameters()}
    assert len(storages) == len(list(net.parameters()))
    net(torch.randn(3, INPUTS)).sum().backward()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    before = net.body.weight.clone()
    optimizer.step()
    assert not torch.equal(before, net.body.weight)
    torch.save(net.state_dict(), out / f"{os.environ['LOCAL_RANK']}.weights")
    assert (out / f"{os.environ['LOCAL_RANK']}.weights").stat().st_size < 10_000


@check
def ranks_know_each_other_in_every_hook(out: Path) -> None:
    seen = []

    class Asks(Net):
        def prepare_data(self) -> None:
            seen.append("prepare_data")
            assert self.trainer.local_rank == 0

        def setup(self, stage: str) -> None:
            assert dist.is_initialized()
            assert dist.get_world_size() == self.trainer.world_size == 2
            assert dist.get_rank() == self.trainer.global_rank == self.global_rank
            seen.append("setup")

        def configure_optimizers(self) -> Any:
            assert isinstance(self.trainer.strategy, ReplicaZeroStrategy)
            return super().configure_optimizers()

    trainer().fit(Asks())
    assert ("prepare_data" in seen) == (os.environ["LOCAL_RANK"] == "0")
    assert "setup" in seen


@check
def gathering_with_gradients(out: Path) -> None:
    class Contrasts(Net):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            everyone = tensor_of(self.all_gather(self(batch[0]), sync_grads=True))
            assert everyone.shape == (2, 4, 1)
            loss = everyone.var()
            loss.backward(retain_graph=True)
            assert self.body.weight.grad is not None
            self.zero_grad()
            return loss

    trainer(limit_train_batches=2).fit(Contrasts())


@check
def samplers_are_the_users_if_they_say_so(out: Path) -> None:
    class Counts(Net):
        def on_train_start(self) -> None:
            self.batches = 0

        def training_step(self, batch: Any, batch_idx: int) -> Any:
            self.batches += 1
            return super().training_step(batch, batch_idx)

    ours, theirs = Counts(), Counts()
    trainer().fit(ours, data(32))
    trainer(use_distributed_sampler=False).fit(theirs, data(32))
    assert (ours.batches, theirs.batches) == (4, 8)


@check
def loaders_and_datamodules_passed_to_fit(out: Path) -> None:
    class Data(L.LightningDataModule):
        def train_dataloader(self) -> Any:
            return data(24)

        def val_dataloader(self) -> Any:
            return [data(8), data(8)]

    class Two(Net):
        def validation_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> None:
            self.log("val", self.loss(batch), sync_dist=True)

    lightning = trainer()
    lightning.fit(Two(), datamodule=Data())
    assert lightning.global_step == 3
    assert {"val/dataloader_idx_0", "val/dataloader_idx_1"} <= lightning.callback_metrics.keys()


@check
def no_step_at_all(out: Path) -> None:
    for options in ({"max_steps": 0}, {"max_epochs": 0}, {"limit_train_batches": 0}):
        lightning = trainer(**options)
        lightning.fit(Net())
        assert lightning.global_step == 0
    fast = trainer(fast_dev_run=True)
    fast.fit(Net())
    assert fast.global_step == 1


@check
def uneven_data_and_limits(out: Path) -> None:
    lightning = trainer(limit_train_batches=3, val_check_interval=2, overfit_batches=0.0, max_epochs=2)
    lightning.fit(Net(), DataLoader(TensorDataset(torch.randn(21, INPUTS), torch.randn(21, 1)), batch_size=3), data(16))
    assert lightning.global_step == 6


@check
def sync_batchnorm_is_what_it_is_under_ddp(out: Path) -> None:
    """The last check: a fit that fails on every rank ends the world."""

    class Norm(Net):
        def __init__(self) -> None:
            super().__init__()
            self.norm = nn.BatchNorm1d(20)

        def forward(self, x: Any) -> Any:
            return self.head(self.norm(self.body(x)))

    with pytest.raises(ValueError, match="SyncBatchNorm expected input tensor to be on"):  # it has no CPU kernel
        trainer(sync_batchnorm=True).fit(Norm())


def do_all(case: Case, out: Path) -> None:
    torch.set_num_threads(1)
    rank = os.environ["LOCAL_RANK"]
    failed = {}
    for name, function in CHECKS.items():
        place = out / name
        place.mkdir(exist_ok=True)
        os.chdir(place)
        L.seed_everything(int(rank), verbose=False)
        try:
            function(place)
        except Exception:
            failed[name] = traceback.format_exc()
            break  # ranks are no longer together
    (out / f"failed{rank}").write_text(json.dumps(failed))
    (out / f"done{rank}").write_text(json.dumps([*CHECKS]))


def test_what_users_rely_on(tmp_path: Path) -> None:
    world.run(Case(devices=2), tmp_path, target=do_all)
    for rank in range(2):
        failed = json.loads((tmp_path / f"failed{rank}").read_text())
        assert not failed, "\n".join(failed.values())
        assert json.loads((tmp_path / f"done{rank}").read_text()) == list(CHECKS)
