"""Lightning's `AsyncCheckpointIO` writes in a thread of rank 0, which may be lost meanwhile."""

import json
import os
import re
import sys
import threading
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
from lightning.pytorch.plugins import AsyncCheckpointIO, TorchCheckpointIO
from lightning.pytorch.plugins.io.wrapper import _WrappingCheckpointIO

from lightning_replica._compat.lightning import after_saves
from tests.support import forked_python

SCRIPT = """
import json, os, signal, time
from pathlib import Path

import lightning as L
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.demos.boring_classes import BoringModel
from lightning.pytorch.plugins import AsyncCheckpointIO, TorchCheckpointIO

from lightning_replica import ReplicaZeroStrategy


class Slow(TorchCheckpointIO):
    def save_checkpoint(self, checkpoint, path, storage_options=None):
        if checkpoint["global_step"] == 2 and not Path("died").exists():
            Path("saving").touch()
            while True:
                time.sleep(0.01)  # until the rank is killed
        super().save_checkpoint(checkpoint, path, storage_options)


class Model(BoringModel):
    def training_step(self, batch, batch_idx):
        if batch_idx == 2 and not Path("died").exists():
            # Where the peer has not come past the save of step 2 or cannot restore this rank from there, the save is
            # repeated, and the file is written then.
            self.trainer.strategy.session.mirrors.settle()
            if self.global_rank == 1:
                Path("peer_is_here").touch()
        if batch_idx == 2 and self.global_rank == 0 and not Path("died").exists():
            while not (Path("saving").exists() and Path("peer_is_here").exists()):
                time.sleep(0.01)
            Path("then").write_text(json.dumps(sorted(os.listdir("saved"))))
            Path("died").touch()
            os.kill(os.getpid(), signal.SIGKILL)
        return super().training_step(batch, batch_idx)


L.Trainer(
    strategy=ReplicaZeroStrategy(replicas=2), accelerator="cpu", devices=2, max_steps=4,
    callbacks=[ModelCheckpoint("saved", every_n_train_steps=1)], plugins=[AsyncCheckpointIO(Slow())],
    logger=False, enable_progress_bar=False, enable_model_summary=False,
).fit(Model())
"""


def test_a_killed_rank_leaves_the_former_checkpoint(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(SCRIPT)
    line = [sys.executable, str(tmp_path / "train.py")]
    done = forked_python.run(line, tmp_path, {**os.environ, "OMP_NUM_THREADS": "1"}, tmp_path / "output", 200)
    assert done.returncode == 0, done.stdout
    assert json.loads((tmp_path / "then").read_text()) == ["epoch=0-step=1.ckpt"]
    assert re.search(
        r"Not exact: \S+/saved/epoch=0-step=2.ckpt: it is not there; rank 0 may have been writing it", done.stdout
    )
    assert sorted(os.listdir(tmp_path / "saved")) == ["epoch=0-step=1.ckpt", "epoch=0-step=4.ckpt"]


class Full(TorchCheckpointIO):
    def __init__(self) -> None:
        self.begins = threading.Event()

    def save_checkpoint(self, checkpoint: Any, path: Any, storage_options: Any = None) -> None:
        self.begins.wait()
        raise OSError("No space left on device")


class Wrapped(_WrappingCheckpointIO):
    def save_checkpoint(self, *args: Any, **kwargs: Any) -> None:
        raise NotImplementedError


@pytest.mark.parametrize("is_wrapped", [False, True])
@pytest.mark.parametrize("fails", [False, True])
def test_the_former_one_goes_only_after_a_save_that_has_succeeded(
    fails: bool, is_wrapped: bool, tmp_path: Path
) -> None:
    full = Full()
    plugin = AsyncCheckpointIO(full if fails else TorchCheckpointIO())
    plugin.save_checkpoint({}, tmp_path / "new.ckpt")
    done: list[bool] = []
    after_saves(Wrapped(plugin) if is_wrapped else plugin, lambda: done.append((tmp_path / "new.ckpt").exists()))
    full.begins.set()
    with pytest.raises(OSError, match="No space left") if fails else nullcontext():
        plugin.teardown()
    assert done == ([] if fails else [True])
