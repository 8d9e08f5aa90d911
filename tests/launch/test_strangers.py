"""Another user of the machine reaches the store of `python train.py`, which listens on loopback, but has no secret."""

import os
import sys
from pathlib import Path

from tests.support import forked_python

SCRIPT = """
import os, signal, sys
from pathlib import Path

import lightning as L
import torch
import torch.distributed as dist
from lightning.pytorch.demos.boring_classes import BoringModel

from lightning_replica import DyingGaspCheckpoint, ReplicaZeroStrategy
from lightning_replica.control import keys

KEYS = [keys.OPTIONS, keys.PHASE, keys.VERDICT, keys.LOOP, keys.SAVING_FORBIDDEN, keys.NO_REPLACEMENT, keys.GASP]
KEYS += [keys.ENDING_DIRECTORY, keys.ENDING_LAST_STEP, keys.ENDING_CODE, keys.ASKED, keys.SEPARATE, keys.FAILED]
KEYS += [make(number) for number in (0, 1, 2) for make in (keys.generation, keys.listens, keys.ending_step, keys.left)]
KEYS += [keys.standby_call(number) for number in (1, 2, 3)]
VALUES = ["what?", "[]", "-1", '["stranger"]', str(Path("mine").absolute())]


class Model(BoringModel):
    def training_step(self, batch, batch_idx):
        if "strange" in sys.argv and batch_idx == 2 and self.global_rank == 1 and not Path("died").exists():
            Path("died").touch()
            store = dist.TCPStore("127.0.0.1", int(os.environ["MASTER_PORT"]), is_master=False, wait_for_workers=False)
            for number, key in enumerate(KEYS):
                store.compare_set(key, "", VALUES[number % len(VALUES)])  # what is there already could be destroyed
            store.add(keys.STANDBY_CALLS, 3)
            os.kill(os.getpid(), signal.SIGKILL)
        return super().training_step(batch, batch_idx)

    def on_train_end(self):
        sums = [float(w.double().sum()) for w in self.parameters()]
        Path(f"rank{self.global_rank}").write_text(str(sums))


L.seed_everything(1)
L.Trainer(
    strategy=ReplicaZeroStrategy(replicas=2, standby=1), accelerator="cpu", devices=2, max_steps=4, logger=False,
    enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False,
    callbacks=[DyingGaspCheckpoint("last")],
).fit(Model())
"""


def run(folder: Path, *arguments: str) -> str:
    (folder / "train.py").write_text(SCRIPT)
    (folder / "stranger.py").write_text("open('imported', 'w')")
    (folder / "mine").mkdir()
    (folder / "mine" / "failures.json").write_text("precious")
    line = [sys.executable, str(folder / "train.py"), *arguments]
    environment = {name: value for name, value in os.environ.items() if "SECRET" not in name}
    done = forked_python.run(line, folder, {**environment, "OMP_NUM_THREADS": "1"}, folder / "output", 200)
    assert done.returncode == 0, done.stdout
    return done.stdout


def test_nothing_that_a_stranger_writes_is_believed(tmp_path: Path) -> None:
    ends = []
    for name in ("untouched", "strange"):
        (tmp_path / name).mkdir()
        said = run(tmp_path / name, name)
        ends.append([(tmp_path / name / f"rank{rank}").read_text() for rank in range(2)])
        assert (tmp_path / name / "mine" / "failures.json").read_text() == "precious"
        assert not (tmp_path / name / "imported").exists()
    assert ends[0] == ends[1]
    assert "rank 1 was replaced" in said
    assert "in the store is ignored, as its tag is not valid" in said
