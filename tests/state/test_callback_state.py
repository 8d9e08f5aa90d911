from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from lightning.pytorch import LightningModule
from lightning.pytorch.callbacks import ModelCheckpoint, StochasticWeightAveraging, Timer
from torch import nn

from lightning_replica._compat.tree import Tree
from lightning_replica.core.inexact import warn
from lightning_replica.state.callback_state import (
    CallbackStates,
    batch_norm_momenta,
    follow_batch_norm_epoch,
    restore_callbacks,
)


def test_the_score_of_a_checkpoint_callback(tmp_path: Path) -> None:
    """It is in the callback's `state_dict`, but Lightning does not load it."""
    before = ModelCheckpoint(tmp_path, monitor="val")
    before.current_score, before.best_model_score = torch.tensor(2.0), torch.tensor(1.0)
    saved = CallbackStates().take({before.state_key: before})
    before.current_score = torch.tensor(3.0)  # of a step that is done again
    replacement = ModelCheckpoint(tmp_path, monitor="val")
    for callback in (before, replacement):
        restore_callbacks({callback.state_key: callback}, saved, warn)
        assert callback.current_score is not None
        assert callback.best_model_score is not None
        assert (callback.current_score.item(), callback.best_model_score.item()) == (2.0, 1.0)


def test_a_file_sets_no_other_attribute(tmp_path: Path) -> None:
    callback = ModelCheckpoint(tmp_path)
    crafted = {"state": {}, "extras": {"dirpath": "/elsewhere", "current_score": 1.0}}
    restore_callbacks({"callback": callback}, {"callback": crafted}, warn)
    assert vars(callback)["dirpath"] == str(tmp_path)
    assert vars(callback)["current_score"] == 1.0


@pytest.mark.parametrize("joins", [False, True])
def test_the_momenta_that_weight_averaging_takes_away(joins: bool) -> None:
    """In its last epoch BatchNorm layers have none; it gives them back in the end, in a replacement too."""

    def training() -> Any:
        model = LightningModule()
        model.layers = nn.Sequential(nn.BatchNorm1d(2, momentum=0.3), nn.BatchNorm1d(2, momentum=None))
        return SimpleNamespace(lightning_module=model, callbacks=[StochasticWeightAveraging(1e-2)])

    trainer = training()
    trainer.callbacks[0].reset_batch_norm_and_save_state(trainer.lightning_module)
    momenta = batch_norm_momenta(Tree.of(trainer.lightning_module))
    here = training() if joins else trainer
    follow_batch_norm_epoch(here, momenta)
    assert [layer.momentum for layer in here.lightning_module.layers] == [None, None]
    here.callbacks[0].reset_momenta()
    assert [layer.momentum for layer in here.lightning_module.layers] == [0.3, None]


def test_outside_of_that_epoch_nothing_is_taken_away() -> None:
    norm, callback = nn.BatchNorm1d(2, momentum=0.3), StochasticWeightAveraging(1e-2)
    model = nn.Sequential(norm)
    follow_batch_norm_epoch(SimpleNamespace(lightning_module=model, callbacks=[callback]), [0.2])  # type: ignore[arg-type]
    assert norm.momentum == 0.2
    assert not callback.momenta


@pytest.mark.parametrize("same_process", [True, False])
def test_the_time_of_a_process_that_goes_back_counts_once(same_process: bool) -> None:
    timer = Timer("00:00:01:00")
    saved = {"timer": {"state": {"time_elapsed": {"train": 5.0}}, "extras": {}}}
    restore_callbacks({"timer": timer}, saved, warn, same_process)
    assert timer._offset == (0 if same_process else 5)
