"""Several fits of a script, and several runs, in one directory: what belongs to which, and which one is taken."""

import hashlib
from dataclasses import replace
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from lightning_replica import CheckpointPublisher, DyingGaspCheckpoint, ReplicaZeroStrategy
from lightning_replica.checkpoint.directory import CheckpointDirectory
from lightning_replica.exit_codes import GASP_WRITTEN
from tests.support import job, world
from tests.support.job import Case, Fault

STEPS = 12


class Model(L.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(16, 4), nn.Dropout(0.1), nn.Linear(4, 1))

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss: Tensor = self.net(batch[0]).square().mean()
        return loss

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), lr=0.01)

    @property
    def digest(self) -> str:
        return hashlib.sha256(b"".join(p.detach().numpy().tobytes() for p in self.parameters())).hexdigest()[:12]


def fit(case: Any, out: Path, model: Model, seed: int, faults: bool, load: str = "") -> int:
    """Train 12 steps, and return at which step it began."""
    torch.set_num_threads(1)
    L.seed_everything(seed, verbose=False)
    strategy = ReplicaZeroStrategy(resume="auto" if case.auto else None)
    saves = CheckpointPublisher(out / "saved", every_n_train_steps=3, keep_last=case.keep_last)
    began = Began()
    trainer = L.Trainer(
        strategy=strategy,
        accelerator="cpu",
        devices=2,
        max_steps=STEPS,
        callbacks=[*([job.Faults(case, out)] if faults else []), began, saves, DyingGaspCheckpoint(out / "saved")],
        default_root_dir=out,
        enable_progress_bar=False,
        enable_model_summary=False,
        enable_checkpointing=True,
        logger=False,
    )
    trainer.fit(model, DataLoader(TensorDataset(torch.randn(32, 16)), 4, shuffle=True), ckpt_path=load or None)
    (out / f"rank{trainer.global_rank}.json").write_text(f'{{"weights": "{model.digest}", "began": {began.at}}}')
    return began.at


class Began(L.Callback):
    at = -1

    def on_train_start(self, trainer: L.Trainer, pl_module: Any) -> None:
        self.at = trainer.global_step


def two_fits(case: Any, out: Path) -> None:
    """The second one trains on what the first one has made."""
    model = Model()
    first = fit(case, out, model, 1, faults=case.strikes == 1)
    second = fit(case, out, model, 2, faults=case.strikes == 2)
    with (out / "began").open("a") as file:
        file.write(f"{first} {second}\n")


def case_of(faults: tuple[Fault, ...] = (), **more: Any) -> Any:
    case: Any = Case(faults, devices=2, gasp=True)
    case.auto, case.keep_last, case.strikes = True, None, 2
    for name, value in more.items():
        setattr(case, name, value)
    return case


@pytest.fixture(scope="module")
def untouched(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Without resume="auto"."""
    outcome = world.run(case_of(auto=False), tmp_path_factory.mktemp("untouched"), target=two_fits)
    assert outcome.code == 0, outcome.logs
    return outcome.ranks


@pytest.mark.parametrize("keep_last", [None, 1])
@pytest.mark.parametrize("strikes", [1, 2])
def test_each_fit_resumes_from_its_own_checkpoints(
    strikes: int, keep_last: int | None, untouched: Any, tmp_path: Path
) -> None:
    case = case_of((Fault("sigterm", 1, "train_batch_end", 7),), strikes=strikes, keep_last=keep_last)
    outcome = world.run(case, tmp_path, target=two_fits)
    assert outcome.code == GASP_WRITTEN, outcome.logs
    outcome = world.run(case, tmp_path, target=two_fits)
    assert outcome.code == 0, outcome.logs
    assert [rank["weights"] for rank in outcome.ranks] == [rank["weights"] for rank in untouched]
    told = set((tmp_path / "began").read_text().splitlines())
    assert told <= ({"7 0", "8 0"} if strikes == 1 else {"12 7", "12 8"})


def test_without_an_interruption(untouched: Any, tmp_path: Path) -> None:
    """The second fit begins anew, although there are checkpoints of the first one."""
    outcome = world.run(case_of(), tmp_path, target=two_fits)
    assert outcome.code == 0, outcome.logs
    assert outcome.ranks == untouched
    last = tmp_path / "saved" / f"step_{STEPS:08d}"
    assert (
        outcome.logs.count(f"{last} is of another fit of the script than this one, its fit 2: this one starts anew")
        == 1
    )


def one_fit(case: Any, out: Path) -> None:
    fit(case, out, Model(), case.seed, faults=True, load=case.load)


def steps(out: Path) -> list[str]:
    return sorted(path.name for path in (out / "saved").iterdir() if path.name.startswith("step_"))


@pytest.mark.parametrize("folder", ["saved", "link"])
def test_a_run_that_goes_on_from_an_older_step(folder: str, tmp_path: Path) -> None:
    """What came after that step is given up: not taken again, and not counted where the newest are kept."""
    case = case_of(seed=1, keep_last=2)
    assert world.run(case_of(seed=1), tmp_path, target=one_fit).code == 0
    assert steps(tmp_path) == [f"step_{step:08d}" for step in (3, 6, 9, 12)]
    fault = (Fault("sigterm", 1, "train_batch_end", 10),)
    (tmp_path / "link").symlink_to("saved")
    load = str(tmp_path / folder / "step_00000006")
    told = replace(Case(fault, devices=2, gasp=True), load=load)
    for name in ("auto", "keep_last", "strikes", "seed"):
        setattr(told, name, getattr(case, name))
    outcome = world.run(told, tmp_path, target=one_fit)
    assert outcome.code == GASP_WRITTEN, outcome.logs
    latest = CheckpointDirectory(tmp_path / "saved").latest(verify=True)
    assert latest.manifest is not None
    assert latest.manifest.step in (10, 11)
    assert latest.manifest.lineage.run == 2
    assert latest.manifest.lineage.after == ((1, 6),)
    left = steps(tmp_path)
    assert "step_00000012" in left  # of the run before, which nobody has asked to tidy
    assert "step_00000003" not in left
    outcome = world.run(case, tmp_path, target=one_fit)
    assert outcome.code == 0, outcome.logs
    assert [rank["began"] for rank in outcome.ranks] == [latest.manifest.step] * 2
