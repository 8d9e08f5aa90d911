"""What changes on a machine while a run is on: a replacement is started from what is there then."""

import os
import sys
from pathlib import Path

import pytest

from lightning_replica.checkpoint.directory import CheckpointDirectory
from lightning_replica.exit_codes import GASP_WRITTEN
from tests.support import forked_python

SCRIPT = """
import os, signal, sys
from pathlib import Path

died = Path("died").exists()
if died and "hardware" in sys.argv:
    os.environ["MKL_CBWR"] = "COMPATIBLE"

import lightning as L
import torch
from lightning.pytorch.demos.boring_classes import BoringModel

import rate
from lightning_replica import DyingGaspCheckpoint, ReplicaZeroStrategy

if died and "threads" in sys.argv:
    torch.set_num_threads(3)


class Model(BoringModel):
    def __init__(self):
        super().__init__()
        self.dropout = torch.nn.Dropout(rate.RATE)

    def training_step(self, batch, batch_idx):
        if batch_idx == 2 and self.global_rank == 1 and not died and "untouched" not in sys.argv:
            Path("died").touch()
            if "edit" in sys.argv:
                Path("rate.py").write_text("RATE = 0.3")
            os.kill(os.getpid(), signal.SIGKILL)
        return super().training_step(self.dropout(batch), batch_idx)

    def on_train_end(self):
        sums = [float(w.double().sum()) for w in self.parameters()]
        Path(f"rank{self.global_rank}").write_text(f"{torch.get_num_threads()} {sums}")


L.seed_everything(1)
strategy = ReplicaZeroStrategy(replicas=2)
L.Trainer(
    strategy=strategy, accelerator="cpu", devices=2, max_steps=4, callbacks=[DyingGaspCheckpoint("last")],
    logger=False, enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False,
).fit(Model())
"""


def run(folder: Path, change: str) -> tuple[int, str]:
    (folder / "train.py").write_text(SCRIPT)
    (folder / "rate.py").write_text("RATE = 0.2")
    line = [sys.executable, str(folder / "train.py"), change]
    done = forked_python.run(line, folder, {**os.environ, "OMP_NUM_THREADS": "1"}, folder / "output", 200)
    return done.returncode, done.stdout


def test_a_module_that_is_edited(tmp_path: Path) -> None:
    """The run ends where it was: a rank that trains something else would be worse."""
    code, said = run(tmp_path, "edit")
    assert code == GASP_WRITTEN, said
    assert "This replacement of rank 1 runs other sources than the run began with: module rate has other" in said
    newest = CheckpointDirectory(tmp_path / "last").latest()
    assert newest.manifest is not None
    assert newest.manifest.step == 2


@pytest.fixture(scope="module")
def untouched(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    folder = tmp_path_factory.mktemp("untouched")
    code, said = run(folder, "untouched")
    assert code == 0, said
    return ends(folder)


def ends(folder: Path) -> list[str]:
    return [(folder / f"rank{rank}").read_text() for rank in range(2)]


def test_a_replacement_with_other_threads_gets_those_of_the_rank(tmp_path: Path, untouched: list[str]) -> None:
    code, said = run(tmp_path, "threads")
    assert code == 0, said
    assert "rank 1 was replaced" in said
    assert ends(tmp_path) == untouched


def test_a_replacement_on_other_hardware_is_named(tmp_path: Path) -> None:
    code, said = run(tmp_path, "hardware")
    assert code == 0, said
    assert "Not exact: the MKL_CBWR of rank 1: it was None and is 'COMPATIBLE' in this replacement" in said
