from pathlib import Path

import torch
from lightning.pytorch.callbacks import ModelCheckpoint

from lightning_replica.callback_state import CallbackStates, restore_callbacks


def test_the_score_of_a_checkpoint_callback(tmp_path: Path) -> None:
    """It is in the callback's `state_dict`, but Lightning does not load it."""
    before = ModelCheckpoint(tmp_path, monitor="val")
    before.current_score, before.best_model_score = torch.tensor(2.0), torch.tensor(1.0)
    saved = CallbackStates().take({before.state_key: before})
    before.current_score = torch.tensor(3.0)  # of a step that is done again
    replacement = ModelCheckpoint(tmp_path, monitor="val")
    for callback in (before, replacement):
        restore_callbacks({callback.state_key: callback}, saved)
        assert callback.current_score is not None
        assert callback.best_model_score is not None
        assert (callback.current_score.item(), callback.best_model_score.item()) == (2.0, 1.0)
