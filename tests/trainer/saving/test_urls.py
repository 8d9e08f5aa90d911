"""Checkpoints of a run in a store of objects: periodic ones and the last, and the same command goes on from them."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from lightning.pytorch.callbacks import Callback, ModelCheckpoint

from lightning_replica import CheckpointPublisher, DyingGaspCheckpoint
from lightning_replica.checkpoint import store
from lightning_replica.checkpoint.directory import CheckpointDirectory
from lightning_replica.checkpoint.location import Url
from lightning_replica.exit_codes import GASP_WRITTEN
from tests.support import job, world
from tests.support.bucket import trouble
from tests.support.job import Case, Fault


def url_of(out: Path, bucket: str | None = None) -> str:
    """What ranks are told; they have nothing but a directory."""
    file = out / "url"
    if bucket is not None:
        out.mkdir(parents=True, exist_ok=True)
        file.write_text(bucket)
    return file.read_text()


def to_a_store(case: Case, out: Path) -> None:
    url = url_of(out)
    callbacks = CheckpointPublisher(url, every_n_train_steps=2, keep_last=2), DyingGaspCheckpoint(url)
    job.run(replace(case, gasp=False), out, callbacks, resume="auto")


def whole(bucket: str) -> list[str]:
    """The checkpoints of a run, from the newest on; nothing else may be there."""
    directory = CheckpointDirectory(bucket)
    found = list(directory.entries(verify=True))
    assert not [entry.problem for entry in found if entry.problem]
    assert directory.tracked == found[0].path.name
    kept = {key.partition("/")[0] for key in store.objects(Url(bucket))}
    assert kept == {"latest", *(entry.path.name for entry in found)}
    return [entry.path.name.removeprefix("step_000000") for entry in found]


@pytest.mark.parametrize(
    ("faults", "step"),
    [
        pytest.param((Fault("kill", 1, "update", 2),), "03", marks=pytest.mark.combinations),
        ((Fault("kill", 1, "update", 2), Fault("kill", 0, "save", 3)), "03"),
        ((Fault("kill", 3, "save", 4),), "04"),
        ((Fault("sigterm", 2, "backward", 3),), "04"),
    ],
    ids=[
        "one is lost",
        "and another who has uploaded its part",
        "in a periodic save",
        "at the step of a periodic save",
    ],
)
def test_the_last_checkpoint_and_the_same_again(
    faults: tuple[Fault, ...], step: str, bucket: str, untouched: world.Outcome, tmp_path: Path
) -> None:
    url_of(tmp_path, bucket)
    ended = world.run(Case(faults=faults, gasp=True), tmp_path, max_restarts=0, target=to_a_store)
    assert ended.code == GASP_WRITTEN, f"{ended.code} {ended.said}\n{ended.logs}"
    assert (tmp_path / f"fired{len(faults) - 1}").exists()
    assert CheckpointDirectory(bucket).latest(verify=True).problems == ()
    assert CheckpointDirectory(bucket).tracked == f"step_000000{step}"
    again = world.run(Case(gasp=True), tmp_path, max_restarts=0, target=to_a_store)
    again.assert_same(untouched)
    assert f"resumes from {bucket}/step_000000{step}." in again.logs
    assert whole(bucket) == ["06", "04"]


def publishes(case: Case, out: Path) -> None:
    job.run(case, out, (CheckpointPublisher(url_of(out), every_n_train_steps=2, keep_last=2),))


def publishes_beside(case: Case, out: Path) -> None:
    job.run(case, out, (CheckpointPublisher(url_of(out), every_n_train_steps=2, keep_last=2, async_save=True),))


@pytest.mark.parametrize("target", [publishes, publishes_beside])
def test_a_rank_is_replaced_and_a_run_goes_on_from_each(
    target: type[None], bucket: str, pair: world.Outcome, tmp_path: Path
) -> None:
    """It is killed with its part of one of them in the store, and nothing of that one published."""
    url_of(tmp_path, bucket)
    case = Case(devices=2, faults=(Fault("kill", 1, "save", 10),))
    world.run(case, tmp_path, target=target).assert_same(pair)
    assert (tmp_path / "fired0").exists()
    assert whole(bucket) == ["12", "10"]
    again = Case(devices=2, load=f"{bucket}/step_00000010")
    world.run(again, tmp_path, target=target).assert_same(pair)


def keeps_one(case: Case, out: Path) -> None:
    url = url_of(out)
    callbacks = ModelCheckpoint(url, "{step}", every_n_train_steps=4), CheckpointPublisher(url)
    job.run(case, out, callbacks, state_dict_type="sharded")


def test_lightnings_own_checkpoints_are_published_too(bucket: str, pair: world.Outcome, tmp_path: Path) -> None:
    url_of(tmp_path, bucket)
    world.run(Case(devices=2), tmp_path, target=keeps_one).assert_same(pair)
    assert whole(bucket) == ["step=12.ckpt"]


def test_what_cannot_be_reached_ends_a_run_before_it_begins(bucket: str, tmp_path: Path) -> None:
    url_of(tmp_path, "s3://nowhere/run")
    outcome = world.run(Case(devices=2), tmp_path, target=publishes)
    assert outcome.code == 1
    assert outcome.logs.count("ConfigurationError: dirpath='s3://nowhere/run' cannot be written to: ") == 1
    assert not any(outcome.batches)


class Down(Callback):
    """The store refuses whatever would change it, from the end of the third step to that of the seventh."""

    def on_train_batch_end(self, trainer: Any, *_: Any) -> None:
        if trainer.is_global_zero and trainer.global_step in (3, 7):
            trouble("refused", 1 if trainer.global_step == 3 else 10**9)


def publishes_to_one_that_is_down(case: Case, out: Path) -> None:
    job.run(case, out, (Down(), CheckpointPublisher(url_of(out), every_n_train_steps=2)))


def test_the_store_is_down_for_a_while(bucket: str, pair: world.Outcome, tmp_path: Path) -> None:
    """Training goes on, and the next checkpoint is written."""
    url_of(tmp_path, bucket)
    outcome = world.run(Case(devices=2), tmp_path, target=publishes_to_one_that_is_down)
    outcome.assert_same(pair)
    for step in (4, 6):
        said = f"the checkpoint of step {step} could not be written: "
        assert outcome.logs.count(said) == 1, outcome.logs
    assert "could not be written: PermissionError: Access Denied. Training continues" in outcome.logs
    assert whole(bucket) == ["12", "10", "08", "02"]
