"""A script whose two fits write to one directory of checkpoints."""

import os
import sys
from pathlib import Path

import pytest

from tests.support import forked_python

SCRIPT = """
import os, signal, sys
from pathlib import Path

import lightning as L
from lightning.pytorch.demos.boring_classes import BoringModel

from lightning_replica import CheckpointPublisher, DyingGaspCheckpoint, ReplicaZeroStrategy

RANK, FIT = int(sys.argv[1]), int(sys.argv[2])


class Model(BoringModel):
    fit = 0

    def training_step(self, batch, batch_idx):
        if (self.fit, batch_idx, self.global_rank) == (FIT, 2, RANK) and not Path("died").exists():
            Path("died").touch()
            os.kill(os.getpid(), signal.SIGKILL)
        return super().training_step(batch, batch_idx)


L.seed_everything(1)
model = Model()
for model.fit in (1, 2):
    L.Trainer(
        strategy=ReplicaZeroStrategy(replicas=2), accelerator="cpu", devices=2, max_steps=4, logger=False,
        enable_progress_bar=False, enable_model_summary=False,
        callbacks=[CheckpointPublisher("saved", every_n_train_steps=2), DyingGaspCheckpoint("saved")],
    ).fit(model)
Path("rank" + os.environ["LOCAL_RANK"]).write_text(str([float(w.double().sum()) for w in model.parameters()]))
"""


def run(folder: Path, rank: int, fit: int) -> tuple[list[str], str]:
    (folder / "train.py").write_text(SCRIPT)
    line = [sys.executable, str(folder / "train.py"), str(rank), str(fit)]
    done = forked_python.run(line, folder, {**os.environ, "OMP_NUM_THREADS": "1"}, folder / "output", 200)
    assert done.returncode == 0, done.stdout
    return [(folder / f"rank{rank}").read_text() for rank in range(2)], done.stdout


@pytest.fixture(scope="module")
def untouched(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    found, said = run(tmp_path_factory.mktemp("untouched"), -1, 1)
    assert "waits for another run" not in said
    return found


@pytest.mark.parametrize("fit", [pytest.param(1, marks=pytest.mark.combinations), 2])
@pytest.mark.parametrize("rank", [0, 1])
def test_a_rank_is_replaced(rank: int, fit: int, untouched: list[str], tmp_path: Path) -> None:
    found, said = run(tmp_path, rank, fit)
    assert f"rank {rank} was replaced" in said
    assert "does not hold what rank 0 has written there" not in said
    assert found == untouched
