"""`ckpt_path="last"`: the newest whole checkpoint in the directories of our callbacks, in whatever is done with it."""

import json
import os
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from lightning.pytorch.callbacks import Callback, ModelCheckpoint
from torch.utils.data import DataLoader, TensorDataset

from lightning_replica import CheckpointPublisher, DyingGaspCheckpoint, ReplicaZeroStrategy
from lightning_replica.checkpoint.export import read_whole
from lightning_replica.exit_codes import GASP_WRITTEN
from tests.checkpoint.test_directory import flip
from tests.support import job, world
from tests.support.bits import same
from tests.support.job import Case, Fault

# Told to end at the end of the third step: the fourth is in the gasp, the third in a periodic checkpoint.
STOPPING = Case(devices=2, faults=(Fault("sigterm", 1, "train_batch_end", 3),), gasp=True, load="last")


def fits(case: Case, out: Path, *callbacks: Callback) -> None:
    job.run(case, out, (*callbacks, CheckpointPublisher(out / "kept", every_n_train_steps=3)))


@pytest.fixture(scope="module")
def told(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run that found nothing to go on from, and what it has left."""
    out = tmp_path_factory.mktemp("told")
    ended = world.run(STOPPING, out, target=fits)
    assert ended.code == GASP_WRITTEN, ended.logs
    assert "resumes from" not in ended.logs
    return out


@pytest.fixture
def left(told: Path, tmp_path: Path) -> Path:
    """A copy: a periodic checkpoint of step 3, a last one of step 4."""
    return shutil.copytree(told, tmp_path / "run")


def chosen(outcome: world.Outcome) -> set[str]:
    """What ranks say that they go on from."""
    return {line.split("resumes from ")[1] for line in outcome.logs.splitlines() if "resumes from" in line}


def test_a_fit_goes_on_and_repeats_no_batch(left: Path, pair: world.Outcome) -> None:
    again = world.run(STOPPING, left, target=fits)
    again.assert_same(pair)
    assert chosen(again) == {f"{left}/gasp/step_00000004."}
    assert len((left / "batches1").read_text().splitlines()) == len(pair.batches[1])


@pytest.mark.parametrize(
    ("name", "damage", "said"),
    [
        pytest.param("contents.pt", lambda file: os.truncate(file, 900), "contents.pt has 900 bytes", id="cut short"),
        pytest.param("__1_0.distcp", flip, "the checksum of __1_0.distcp differs", id="a flipped bit"),
    ],
)
def test_from_the_one_before_if_the_newest_is_damaged(
    name: str, damage: Callable[[Path], None], said: str, left: Path, pair: world.Outcome
) -> None:
    file = left / "gasp" / "step_00000004" / name
    damage(file)
    again = world.run(STOPPING, left, target=fits)
    again.assert_same(pair)
    assert chosen(again) == {f"{left}/kept/step_00000003."}
    assert again.logs.count(f"Passed over: The checkpoint {file.parent} cannot be used: {said}") == 1


class Evaluated(job.Model):
    def test_step(self, batch: Any, batch_idx: int) -> None:
        self.validation_step(batch, batch_idx)

    def predict_step(self, batch: Any, batch_idx: int) -> Any:
        return self(batch[0])


def evaluates(case: Case, out: Path) -> None:
    """A script that trains nothing."""
    torch.set_num_threads(1)
    found = {}
    for what in ("validate", "test", "predict"):
        L.seed_everything(8, verbose=False)
        model = Evaluated(job.Faults(case, out))
        trainer = L.Trainer(
            strategy=ReplicaZeroStrategy(),
            accelerator="cpu",
            devices=case.devices,
            callbacks=[DyingGaspCheckpoint(out / "gasp"), CheckpointPublisher(out / "kept")],
            logger=False,
            enable_progress_bar=False,
        )
        getattr(trainer, what)(model, DataLoader(TensorDataset(torch.ones(4, 16), torch.ones(4, 1))), ckpt_path="last")
        found[what] = str(trainer.ckpt_path)
        torch.save(model.state_dict(), out / f"{what}{trainer.global_rank}.pt")
    (out / f"found{os.environ['LOCAL_RANK']}.json").write_text(json.dumps(found))


@pytest.mark.parametrize("newest", ["gasp/step_00000004", "kept/step_00000003"])
def test_validate_test_and_predict(newest: str, left: Path) -> None:
    if not newest.startswith("gasp"):
        shutil.rmtree(left / "gasp" / "step_00000004")
    outcome = world.run(replace(STOPPING, faults=()), left, target=evaluates)
    assert outcome.code == 0, outcome.logs
    weights = read_whole(left / newest)["state_dict"]
    for rank in range(2):
        found = json.loads((left / f"found{rank}.json").read_text())
        assert found == dict.fromkeys(("validate", "test", "predict"), str(left / newest))
        for what in found:
            assert same(dict(torch.load(left / f"{what}{rank}.pt", weights_only=True)), weights), what


def fits_twice(case: Case, out: Path) -> None:
    """One epoch, then what is left of two, with a trainer and a module of its own."""
    for epochs, load in ((1, ""), (2, "last")):
        fits(replace(case, epochs=epochs, load=load), out)


def test_a_second_fit_of_one_script(pair: world.Outcome, tmp_path: Path) -> None:
    twice = world.run(Case(devices=2), tmp_path, target=fits_twice)
    twice.assert_same(pair)
    assert chosen(twice) == {f"{tmp_path}/kept/step_00000006."}
    assert len((tmp_path / "batches0").read_text().splitlines()) == len(pair.batches[0])


def fits_with_last(case: Case, out: Path) -> None:
    """Lightning's own last checkpoint, of step 5, beside a directory of ours."""
    saves_last = ModelCheckpoint(out / "lightning", save_last=True, every_n_train_steps=5, save_top_k=0)
    fits(case, out, saves_last)


def test_lightnings_own_counts_where_there_is_none_of_ours(pair: world.Outcome, tmp_path: Path) -> None:
    case = Case(devices=2, faults=(Fault("exit", 0, "train_batch_end", 6),))
    assert world.run(case, tmp_path, max_restarts=0, target=fits_with_last).code != 0
    ours, case = tmp_path / "kept" / "step_00000003", replace(case, load="last")
    shutil.copytree(tmp_path, tmp_path / "copy")
    with_ours = world.run(case, tmp_path, target=fits_with_last)
    with_ours.assert_same(pair)
    assert chosen(with_ours) == {f"{ours}."}
    shutil.rmtree(tmp_path / "copy" / "kept")
    with_theirs = world.run(case, tmp_path / "copy", target=fits_with_last)
    with_theirs.assert_same(pair)
    assert chosen(with_theirs) == set()
    assert f"Restored all states from the checkpoint at {tmp_path}/copy/lightning/last.ckpt" in with_theirs.logs
