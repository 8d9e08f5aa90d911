"""Mistakes a user makes: one error that says what, what was given and what to do; before anyone waits for anyone."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch

from lightning_replica import ConfigurationError, ReplicaZeroStrategy
from tests.support import job, world
from tests.support.job import Case, Fault


def trainer(**options: Any) -> L.Trainer:
    defaults: dict[str, Any] = {"accelerator": "cpu", "devices": 4, "logger": False, "strategy": "replica_zero"}
    return L.Trainer(**{**defaults, **options})


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"devices": 3}, r"replicas=2 does not divide world_size=3.*Choose one of 1, 3"),
        ({"devices": 1}, r"needs at least 2 ranks, got world_size=1.*Trainer\(devices=2\)"),
        ({"devices": 1, "strategy": ReplicaZeroStrategy(replicas=1)}, "at least 2 ranks"),
        ({"num_nodes": 2}, r"num_nodes=2.*Set `num_nodes=1`"),
        ({"precision": "bf16-mixed"}, r"bf16-mixed.*precision='32-true'"),
    ],
)
def test_the_trainer_refuses(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigurationError, match=message):
        trainer(**options)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"replicas": 0}, r"replicas=0 must be a number, 1 or more"),
        ({"replicas": "two"}, r"replicas='two' must be a number"),
        ({"bucket_bytes": True}, r"bucket_bytes=True must be"),
        ({"timeout_s": 0}, "timeout_s=0 must be"),
        ({"max_restarts": -1}, "max_restarts=-1 must be a whole number, 0 or more"),
    ],
)
def test_the_strategy_refuses(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigurationError, match=message):
        ReplicaZeroStrategy(**options)


def test_a_wrong_word_is_an_error() -> None:
    with pytest.raises(TypeError, match="replcas"):
        ReplicaZeroStrategy(replcas=2)  # type: ignore[call-arg]


def test_configuration_errors_are_value_errors() -> None:
    assert issubclass(ConfigurationError, ValueError)


def lbfgs(case: Case, out: Path) -> None:
    job.Model.configure_optimizers = lambda self: torch.optim.LBFGS(self.parameters())
    job.run(case, out)


def nothing_to_train(case: Case, out: Path) -> None:
    def configure(self: Any) -> Any:
        self.requires_grad_(False)
        return torch.optim.SGD(self.parameters(), lr=0.1)

    job.Model.configure_optimizers = configure
    job.run(case, out)


def manual(case: Case, out: Path) -> None:
    job.Model.automatic_optimization = False  # type: ignore[assignment]
    job.run(case, out)


@pytest.mark.parametrize(
    ("target", "message"),
    [
        (lbfgs, "LBFGS is not known to update every element on its own"),
        (nothing_to_train, "There is no parameter to train"),
        (manual, "supports automatic optimization so far"),
    ],
)
def test_a_fit_refuses(target: Any, message: str, tmp_path: Path) -> None:
    outcome = world.run(Case(devices=2, clip=None, accumulate=1), tmp_path, target=target)
    assert outcome.code == 1
    assert message in outcome.logs
    assert "outside of training" in outcome.said[0]


def fit_again(case: Case, out: Path) -> None:
    try:
        job.run(case, out)
    except job.Injected:
        job.run(case, out)


def test_a_second_fit_after_a_failed_one(tmp_path: Path) -> None:
    faults = tuple(Fault("raise", rank, "forward", 1) for rank in range(2))
    outcome = world.run(Case(faults=faults, devices=2), tmp_path, target=fit_again)
    assert outcome.code == 1
    assert "An earlier run of this script has failed" in outcome.logs
    assert "Every rank raised an exception in the same step" in outcome.logs


def other_devices(case: Case, out: Path) -> None:
    job.run(case, out)
    job.run(replace(case, replicas=1), out)


def test_another_grid_in_the_same_script(tmp_path: Path) -> None:
    outcome = world.run(Case(devices=2), tmp_path, target=other_devices)
    assert outcome.code == 1
    assert "replicas=2), this one asks for Grid(world_size=2, replicas=1)" in outcome.logs


def fit_twice(case: Case, out: Path) -> None:
    job.run(case, out)
    job.run(case, out)


def test_two_fits_in_one_script(tmp_path: Path) -> None:
    """Each begins from the seed, so the second ends where the first did."""
    once = world.run(Case(devices=2), tmp_path / "once")
    twice = world.run(Case(devices=2), tmp_path / "twice", target=fit_twice)
    assert twice.code == 0, twice.logs
    assert [rank["weights"] for rank in twice.ranks] == [rank["weights"] for rank in once.ranks]
