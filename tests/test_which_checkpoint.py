import os
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import fsspec
import pytest

from lightning_replica import ConfigurationError, DyingGaspCheckpoint
from lightning_replica.checkpoint import store
from lightning_replica.checkpoint.attempts import attempts_at
from lightning_replica.launch.environment import LOOPBACK, RankEnvironment, serve
from lightning_replica.launch.once import Once
from lightning_replica.recovery.faults import Fault
from lightning_replica.recovery.generation import Generations
from lightning_replica.which_checkpoint import WhichCheckpoint
from tests.checkpoint.small import directory_of, save
from tests.support.ranks import free_port


class Recorder:
    """A callback of the user's that has a directory too."""

    directory = "recordings"


def _fit_impl(model: str, ckpt_path: str | None = None) -> None:
    """As the trainer's."""


def alone(choose: Callable[[], str]) -> str:
    return choose()


def fill_in(callbacks: list[Any], once: Callable[[Callable[[], str]], str] = alone, **given: str) -> dict[str, Any]:
    which = WhichCheckpoint("auto", once)
    return which.fill_in(SimpleNamespace(callbacks=callbacks), _fit_impl, ("model",), given).arguments


def test_only_our_callbacks_say_where_checkpoints_are(tmp_path: Path) -> None:
    assert fill_in([Recorder(), DyingGaspCheckpoint(tmp_path)]) == {"model": "model"}
    with pytest.raises(ConfigurationError, match="no callback says where those are"):
        fill_in([Recorder()])


def test_one_rank_chooses_for_all(tmp_path: Path) -> None:
    """A replacement runs the script again, and must not find what was saved meanwhile; a second fit shall."""
    callbacks = [DyingGaspCheckpoint(tmp_path)]
    directory = directory_of(tmp_path, 1)
    store = serve(LOOPBACK)

    def once(rank: int, generation: int) -> Once:
        return Once(RankEnvironment(LOOPBACK, store.port, os.getpid(), generation), rank)

    ranks = [once(0, 0), once(1, 0)]
    assert fill_in(callbacks, ranks[0], ckpt_path="last")["ckpt_path"] == str(directory.path_of(1))
    save(directory.path_of(2), 2, 2.0)
    Generations(store).begin(1, Fault("death", (0,), "rank 0 died"))
    for each in (ranks[1], once(0, 1), once(1, 1)):
        assert fill_in(callbacks, each, ckpt_path="last")["ckpt_path"] == str(directory.path_of(1))
    for each in ranks:
        assert fill_in(callbacks, each, ckpt_path="last")["ckpt_path"] == str(directory.path_of(2))


def test_a_store_that_says_nothing_is_no_empty_one(bucket: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A run that began anew then would cost what the last one has done."""
    callbacks = [DyingGaspCheckpoint(bucket)]
    assert fill_in(callbacks) == {"model": "model"}
    directory = directory_of(bucket, 1)
    assert fill_in(callbacks)["ckpt_path"] == f"{bucket}/step_00000001"
    damaged = save(directory.path_of(2), 2, 2.0)
    store.remove([attempt.url / "plain.pt" for attempt in attempts_at(damaged)])
    assert fill_in(callbacks)["ckpt_path"] == f"{bucket}/step_00000001"
    monkeypatch.setenv("AWS_ENDPOINT_URL", f"http://127.0.0.1:{free_port()}")
    fsspec.filesystem("s3").clear_instance_cache()
    with pytest.raises(ConfigurationError, match=rf"newest cannot be told: {bucket} could not be listed: .*connect"):
        fill_in(callbacks)
    fsspec.filesystem("s3").clear_instance_cache()
