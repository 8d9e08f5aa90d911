import concurrent.futures
import itertools
import logging
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import fsspec
import pytest
import torch.distributed as dist

import lightning_replica.control.run_on_rank0
from lightning_replica import CheckpointPublisher, ConfigurationError, DyingGaspCheckpoint
from lightning_replica.checkpoint import store
from lightning_replica.checkpoint.attempts import attempts_at
from lightning_replica.control import departures, keys
from lightning_replica.control.run_on_rank0 import run_on_rank0
from lightning_replica.trainer.saving import which_checkpoint
from lightning_replica.trainer.saving.which_checkpoint import WhichCheckpoint
from tests.checkpoint.rewrite import rewrite
from tests.checkpoint.small import directory_of, save
from tests.checkpoint.test_directory import flip
from tests.support.ranks import free_port, run_ranks
from tests.support.typed import in_store, on_disk


class Recorder:
    """A callback of the user's that has a directory too."""

    directory = "recordings"


def _fit_impl(model: str, ckpt_path: str | None = None) -> None:
    """As the trainer's."""


@pytest.fixture(autouse=True)
def no_fit_has_begun(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(which_checkpoint, "_fits", 0)


def trainer_with(callbacks: list[Any]) -> Any:
    return SimpleNamespace(callbacks=callbacks, loggers=[], _checkpoint_connector=SimpleNamespace())


def fill_in(callbacks: list[Any], **given: str) -> dict[str, Any]:
    which_checkpoint._fits = 0  # in another start of the script
    which = WhichCheckpoint("auto", on_rank0=lambda choose: choose())
    return which.fill_in(trainer_with(callbacks), _fit_impl, ("model",), given).arguments


def test_a_checkpoint_that_is_given() -> None:
    which = WhichCheckpoint("there", on_rank0=lambda choose: pytest.fail(choose()))
    trainer = trainer_with([])
    assert which.fill_in(trainer, _fit_impl, ("model",), {}).arguments == {"model": "model", "ckpt_path": "there"}
    asked = {"ckpt_path": "elsewhere"}
    assert which.fill_in(trainer, _fit_impl, ("model",), asked).arguments == {"model": "model", **asked}


def test_only_our_callbacks_say_where_checkpoints_are(tmp_path: Path) -> None:
    assert fill_in([Recorder(), DyingGaspCheckpoint(tmp_path)]) == {"model": "model"}
    with pytest.raises(ConfigurationError, match="no callback names a directory of checkpoints"):
        fill_in([Recorder()])


def test_a_replacement_is_told_what_was_chosen(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It runs the script again, and must not find what was saved meanwhile; another run shall."""
    callbacks, store = [DyingGaspCheckpoint(tmp_path)], dist.HashStore()
    directory = directory_of(tmp_path, 1)

    def chosen() -> Any:
        which = WhichCheckpoint("auto", on_rank0=lambda choose: run_on_rank0(0, store, choose, 60))
        return which.fill_in(trainer_with(callbacks), _fit_impl, ("model",), {}).arguments["ckpt_path"]

    for _ in ("rank 0", "its replacement"):
        monkeypatch.setattr(lightning_replica.control.run_on_rank0, "_numbers", itertools.count())
        monkeypatch.setattr(which_checkpoint, "_fits", 0)
        assert chosen() == str(directory.path_of(1))
        save(directory.path_of(2), 2, 2.0)
    monkeypatch.setattr(which_checkpoint, "_fits", 0)
    assert chosen() == str(directory.path_of(2))


def test_one_with_a_flipped_bit_is_passed_over(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """It would be loaded, end the run, and be the newest again when that is started anew."""
    directory, other = directory_of(tmp_path / "a", 1, 4), directory_of(tmp_path / "b", 2, 3)
    callbacks = [DyingGaspCheckpoint(on_disk(directory.path)), CheckpointPublisher(on_disk(other.path))]
    assert fill_in(callbacks)["ckpt_path"] == str(directory.path_of(4))
    flip(on_disk(directory.path_of(4)) / "__0_0.distcp")
    assert fill_in(callbacks)["ckpt_path"] == str(other.path_of(3))
    assert f"Passed over: The checkpoint {directory.path_of(4)} cannot be used: the checksum of" in caplog.text
    rewrite(on_disk(other.path_of(3)), "plain.pt", b"not torch's")
    assert fill_in(callbacks)["ckpt_path"] == str(other.path_of(2))
    assert f"Passed over: The checkpoint {other.path_of(3)} cannot be used: plain.pt cannot be loaded" in caplog.text


def test_none_is_whole(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    directory = directory_of(tmp_path, 1)
    flip(on_disk(directory.path_of(1)) / "__0_0.distcp")
    caplog.set_level(logging.INFO, "lightning.pytorch.replica_zero")
    assert fill_in([DyingGaspCheckpoint(tmp_path)]) == {"model": "model"}
    assert f"Passed over: The checkpoint {directory.path_of(1)} cannot be used" in caplog.text


def choose(rank: int, store: Any, out: str) -> str:
    def work() -> str:
        with (Path(out) / "worked").open("a") as file:
            file.write(f"{rank}")
        return "the newest"

    return run_on_rank0(rank, store, work, 60)


def refuse(rank: int, store: Any) -> str:
    def work() -> str:
        raise ConfigurationError("cannot be told")

    return run_on_rank0(rank, store, work, 60)


def test_one_rank_chooses_for_all(tmp_path: Path) -> None:
    assert run_ranks(3, choose, str(tmp_path)) == ["the newest"] * 3
    assert (tmp_path / "worked").read_text() == "0"
    for result in run_ranks(2, refuse):
        assert "ConfigurationError: cannot be told" in result["raised"]


def test_a_store_that_says_nothing_is_no_empty_one(bucket: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A run that began anew then would cost what the last one has done."""
    callbacks = [DyingGaspCheckpoint(bucket)]
    assert fill_in(callbacks) == {"model": "model"}
    directory = directory_of(bucket, 1)
    assert fill_in(callbacks)["ckpt_path"] == f"{bucket}/step_00000001"
    damaged = save(in_store(directory.path_of(2)), 2, 2.0)
    store.remove([attempt.url / "plain.pt" for attempt in attempts_at(damaged)])
    assert fill_in(callbacks)["ckpt_path"] == f"{bucket}/step_00000001"
    (attempt,) = attempts_at(save(in_store(directory.path_of(3)), 3, 3.0))
    content = store.read(attempt.url / "__0_0.distcp")
    assert content is not None
    store.write(attempt.url / "__0_0.distcp", content[:-1] + bytes([content[-1] ^ 1]))
    assert fill_in(callbacks)["ckpt_path"] == f"{bucket}/step_00000001"
    monkeypatch.setenv("AWS_ENDPOINT_URL", f"http://127.0.0.1:{free_port()}")
    fsspec.filesystem("s3").clear_instance_cache()
    with pytest.raises(
        ConfigurationError, match=rf"newest checkpoint cannot be determined: {bucket} could not be listed: .*connect"
    ):
        fill_in(callbacks)
    fsspec.filesystem("s3").clear_instance_cache()


def test_a_call_that_rank_0_does_not_make() -> None:
    """It has ended, or is late; one that was replaced has not ended."""
    store = dist.HashStore()
    departures.leave(store, 0)
    with pytest.raises(ConfigurationError, match=r"waits for rank 0, which has ended .* are for all ranks"):
        run_on_rank0(1, store, pytest.fail, 1e6)
    departures.come_back(store, 0)
    with pytest.raises(ConfigurationError, match=r"within 0.1 s \(rendezvous_timeout_s\)"):
        run_on_rank0(1, store, pytest.fail, 0.1)


def test_rank_0_may_take_its_time(monkeypatch: pytest.MonkeyPatch) -> None:
    numbers = itertools.count()
    monkeypatch.setattr(lightning_replica.control.run_on_rank0, "_numbers", numbers)
    store = dist.HashStore()
    store.set(keys.rank0_began(0), "yes")
    departures.leave(store, 0)  # another fit's
    waits = ThreadPoolExecutor(1).submit(run_on_rank0, 1, store, pytest.fail, 0.0)
    with pytest.raises(concurrent.futures.TimeoutError):
        waits.result(0.3)
    store.set(keys.rank0_result(0), '{"result": "found"}')
    assert waits.result(60) == "found"
