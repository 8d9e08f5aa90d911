"""The same command again, after a run that was told to end: what users find in their files is that of one run.

And what a replacement, or a fit that resumes, would have to read from files that others have written.
"""

import os
from pathlib import Path
from typing import Any

import lightning as L
import numpy as np
import pytest
import torch
from lightning.pytorch.callbacks import Callback, ModelCheckpoint
from lightning.pytorch.cli import LightningArgumentParser, SaveConfigCallback
from lightning.pytorch.loggers import CSVLogger
from omegaconf import OmegaConf
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from lightning_replica import DyingGaspCheckpoint, ReplicaZeroStrategy
from lightning_replica.checkpoint.directory import CheckpointDirectory
from lightning_replica.checkpoint.sharded import read_plain
from lightning_replica.exit_codes import GASP_WRITTEN
from tests.support import job, world
from tests.support.job import Case, Fault


class Scale:
    """An object among the hyperparameters, as a loss or a normalizer."""

    def __init__(self, by: float) -> None:
        self.by = by


class Model(L.LightningModule):
    def __init__(self, scale: Any, **more: Any) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.net = nn.Linear(16, 1)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = self.net(batch[0]).square().mean()
        self.log("loss", loss)
        return loss

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), lr=0.1)


def fit(
    case: Case, out: Path, strategy: ReplicaZeroStrategy, model: Any, callbacks: list[Callback], **more: Any
) -> Any:
    torch.set_num_threads(1)
    L.seed_everything(7, verbose=False)
    trainer = L.Trainer(
        strategy=strategy,
        accelerator="cpu",
        devices=2,
        max_epochs=4,
        callbacks=[job.Faults(case, out), *callbacks],
        log_every_n_steps=1,
        enable_progress_bar=False,
        enable_model_summary=False,
        **{"default_root_dir": out, "enable_checkpointing": False, "logger": False, **more},
    )
    data = DataLoader(TensorDataset(torch.randn(32, 16)), 4)  # 4 steps an epoch
    trainer.fit(model, data, ckpt_path=case.load or None)
    (out / f"rank{trainer.global_rank}.json").write_text(f'{{"epoch": {trainer.current_epoch}}}')
    return trainer


def again_and_again(case: Case, out: Path) -> None:
    """A command that is the same each time: names of files are fixed, and LightningCLI saves its configuration."""
    parser = LightningArgumentParser()
    parser.add_argument("--rate", default=0.1)
    config = SaveConfigCallback(parser, parser.parse_args([]))
    logger = CSVLogger(out, name="", version="log", flush_logs_every_n_steps=1)
    strategy = ReplicaZeroStrategy(resume="auto")
    fit(case, out, strategy, Model(2.0), [config, DyingGaspCheckpoint(out / "gasp")], logger=logger)


def table(out: Path) -> str:
    return (out / "log" / "metrics.csv").read_text()


def test_rows_and_configuration_of_the_run_before(tmp_path: Path) -> None:
    untouched, told = tmp_path / "untouched", tmp_path / "told"
    assert world.run(Case(devices=2, gasp=True), untouched, target=again_and_again).code == 0
    case = Case((Fault("sigterm", 1, "train_batch_end", 6),), devices=2, gasp=True)
    outcome = world.run(case, told, target=again_and_again)
    assert outcome.code == GASP_WRITTEN, outcome.logs
    assert 1 < len(table(told).splitlines()) < len(table(untouched).splitlines())
    outcome = world.run(case, told, target=again_and_again)
    assert outcome.code == 0, outcome.logs
    assert table(told) == table(untouched)
    assert (told / "log" / "config.yaml").read_text() == (untouched / "log" / "config.yaml").read_text()


def with_an_object(case: Case, out: Path) -> None:
    logger = CSVLogger(out, name="", version="log", flush_logs_every_n_steps=1)
    fit(case, out, ReplicaZeroStrategy(), Model(Scale(2.0)), [], logger=logger)


def test_hyperparameters_that_cannot_be_read_again(tmp_path: Path) -> None:
    untouched, killed = tmp_path / "untouched", tmp_path / "killed"
    assert world.run(Case(devices=2), untouched, target=with_an_object).code == 0
    outcome = world.run(Case((Fault("kill", 0, "backward", 6),), devices=2), killed, target=with_an_object)
    assert outcome.code == 0, outcome.logs
    assert table(killed) == table(untouched)
    written = (killed / "log" / "hparams.yaml").read_text()
    assert written == (untouched / "log" / "hparams.yaml").read_text()
    assert "python/object" in written


MORE = {
    "rate": np.float32(0.5),
    "rates": [np.int64(3), {"a": np.arange(3)}],
    "folder": Path("somewhere"),
    "nested": {"fine": 1, "scale": Scale(1.0)},
}


class Remembers(L.Callback):
    """A callback whose state has an object of the user's."""

    def __init__(self) -> None:
        self.scale = Scale(1.0)

    def on_train_batch_end(self, *_: Any) -> None:
        self.scale.by += 1

    def state_dict(self) -> dict[str, Any]:
        return {"scale": self.scale}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.scale = state_dict["scale"]

    def on_train_end(self, trainer: L.Trainer, *_: Any) -> None:
        assert self.scale.by == 1 + trainer.global_step


def with_many_kinds(case: Case, out: Path) -> None:
    model = Model(Scale(2.0), config=OmegaConf.create({"a": [1, "${b}"], "b": 2}), **MORE)
    fit(case, out, ReplicaZeroStrategy(resume="auto"), model, [DyingGaspCheckpoint(out / "gasp"), Remembers()])


def test_hyperparameters_in_the_last_checkpoint(tmp_path: Path) -> None:
    """What cannot be written is named when the fit begins. It costs nobody the checkpoint."""
    case = Case((Fault("sigterm", 1, "train_batch_end", 6),), devices=2, gasp=True)
    outcome = world.run(case, tmp_path, target=with_many_kinds)
    assert outcome.code == GASP_WRITTEN, outcome.logs
    (said,) = (line for line in outcome.logs.splitlines() if " and lack: " in line)
    name, kind = "hyper_parameters", f"is a {Scale.__module__}.Scale"
    left = [f"{name}['scale'] {kind}", f"{name}['nested'], as {name}['nested']['scale'] {kind}"]
    left += [f"callbacks['Remembers'], as callbacks['Remembers']['scale'] {kind}"]
    assert sorted(said.partition(" and lack: ")[2].partition(". A run that")[0].split("; ")) == sorted(left)
    path = CheckpointDirectory(tmp_path / "gasp").latest(verify=True).path
    assert path is not None
    found = read_plain(path)["hyper_parameters"]
    assert found.keys() == {"rate", "rates", "folder", "config"}
    assert (type(found["rate"]), found["rate"]) == (np.float32, 0.5)
    assert found["rates"][0] == 3
    assert found["rates"][1]["a"].tolist() == [0, 1, 2]
    assert found["folder"] == Path("somewhere")
    assert found["config"] == {"a": [1, "${b}"], "b": 2}
    outcome = world.run(case, tmp_path, target=with_many_kinds)
    assert outcome.code == 0, outcome.logs


class Stops(Callback):
    """Decides to stop before the fit may stop."""

    def on_train_epoch_end(self, trainer: L.Trainer, pl_module: Any) -> None:
        trainer.should_stop = trainer.should_stop or trainer.current_epoch == 0


def stops_early(case: Case, out: Path) -> None:
    save = ModelCheckpoint(out, "{epoch}", save_top_k=-1)
    fit(case, out, ReplicaZeroStrategy(), Model(2.0), [Stops(), save], enable_checkpointing=True, min_epochs=3)


@pytest.mark.parametrize("epoch", [0, 1])
def test_a_decision_to_stop_is_remembered(epoch: int, tmp_path: Path) -> None:
    untouched, resumed = tmp_path / "untouched", tmp_path / "resumed"
    outcome = world.run(Case(devices=2), untouched, target=stops_early)
    assert outcome.ranks == [{"epoch": 3}, {"epoch": 3}], outcome.logs
    load = str(untouched / f"epoch={epoch}.ckpt")
    again = world.run(Case(devices=2, load=load), resumed, target=stops_early)
    assert again.ranks == outcome.ranks
    assert again.logs.count("the fit had been told to stop (trainer.should_stop") == 1


def looks_for_the_last(case: Case, out: Path) -> None:
    own = out / f"of rank {os.environ['LOCAL_RANK']}"
    save = ModelCheckpoint(own, save_last=True)
    fit(case, out, ReplicaZeroStrategy(), Model(2.0), [save], enable_checkpointing=True)


def test_the_last_checkpoint_is_another_one_on_some_rank(tmp_path: Path) -> None:
    assert world.run(Case(devices=2), tmp_path, target=looks_for_the_last).code == 0
    outcome = world.run(Case(devices=2, load="last"), tmp_path, target=looks_for_the_last)
    assert outcome.code == 1, outcome.logs
    said = f"This rank is to load no checkpoint, but rank 0 {tmp_path / 'of rank 0' / 'last.ckpt'}."
    assert said in outcome.said[0], outcome.said
    assert "Restoring states" not in outcome.logs
