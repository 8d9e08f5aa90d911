"""Mistakes a user makes: one error that says what, what was given and what to do; before anyone waits for anyone."""

import os
import re
from dataclasses import replace
from importlib import metadata
from pathlib import Path
from typing import Any

import lightning as L
import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.plugins import MixedPrecision

from lightning_replica import ConfigurationError, ReplicaZeroStrategy
from tests.support import job, world
from tests.support.job import Case, Fault
from tests.trainer.scenarios import SCENARIOS, fit


def trainer(**options: Any) -> L.Trainer:
    defaults: dict[str, Any] = {"accelerator": "cpu", "devices": 4, "logger": False, "strategy": "replica_zero"}
    return L.Trainer(**{**defaults, **options})


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"devices": 3}, r"replicas=2 does not divide world_size=3.*Choose one of 1, 3"),
        ({"devices": 4, "strategy": ReplicaZeroStrategy(replicas=8)}, r"replicas=8 does not divide.*one of 1, 2, 4"),
        ({"num_nodes": 2}, r"num_nodes=2.*torchrun.*set `num_nodes=1`"),
        ({"plugins": MixedPrecision("bf16-mixed", "cuda")}, r"'bf16-mixed' is for cuda, but the accelerator is cpu"),
    ],
)
def test_the_trainer_refuses(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigurationError, match=message):
        trainer(**options)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"replicas": 0}, r"replicas=0 must be a whole number, 1 or more"),
        ({"replicas": "two"}, r"replicas='two' must be a whole number"),
        ({"bucket_bytes": True}, r"bucket_bytes=True must be"),
        ({"timeout_s": 0}, "timeout_s=0 must be"),
        ({"max_restarts": -1}, "max_restarts=-1 must be a whole number, 0 or more"),
        ({"replicas": 2.5}, r"replicas=2.5 must be a whole number, 1 or more"),
        ({"rendezvous_timeout_s": 0}, "rendezvous_timeout_s=0 must be"),
        ({"hang_min_s": 0}, "hang_min_s=0 must be a number of seconds"),
        ({"hang_max_s": "long"}, "hang_max_s='long' must be a number of seconds"),
        ({"hang_min_s": 90, "hang_max_s": 30.0}, "hang_min_s=90 must not be more than hang_max_s=30.0"),
        ({"partition": "row"}, "partition='row' must be one of 'element', 'parameter'"),
        ({"reduce_dtype": "bf16"}, "reduce_dtype='bf16' must be one of None, 'bfloat16', 'float16', 'float32'"),
        ({"whole_gradients": "yes"}, "whole_gradients='yes' must be one of True, False, 'auto'"),
        ({"state_dict_type": "half"}, "state_dict_type='half' must be one of 'auto', 'full', 'sharded'"),
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
    job.Model.configure_optimizers = lambda self: torch.optim.LBFGS(self.parameters())  # type: ignore[method-assign]
    job.run(case, out)


def nothing_to_train(case: Case, out: Path) -> None:
    def configure(self: Any) -> Any:
        self.requires_grad_(False)
        return torch.optim.SGD(self.parameters(), lr=0.1)

    job.Model.configure_optimizers = configure  # type: ignore[method-assign]
    job.run(case, out)


def another_model(case: Case, out: Path) -> None:
    original = job.Model.__init__

    def init(self: Any, faults: Any) -> None:
        original(self, faults)
        if os.environ["LOCAL_RANK"] == "1":
            self.last = torch.nn.Linear(24, 2)

    job.Model.__init__ = init  # type: ignore[method-assign]
    job.run(case, out)


def other_replicas(case: Case, out: Path) -> None:
    job.run(replace(case, replicas=1 + int(os.environ["LOCAL_RANK"])), out)


def other_versions(case: Case, out: Path) -> None:
    if os.environ["LOCAL_RANK"] == "0":
        torch.__version__ = "1.0"  # type: ignore[assignment]
    job.run(case, out)


def other_lightning(case: Case, out: Path) -> None:
    """Lightning lies on the path without having been installed, and is another one on rank 0."""
    installed = metadata.version

    def version(name: str) -> str:
        if name == "lightning":
            raise metadata.PackageNotFoundError(name)
        return installed(name)

    metadata.version = version  # type: ignore[assignment]
    if os.environ["LOCAL_RANK"] == "0":
        pl.__version__ = "1.0"
    job.run(case, out)


def anothers_checkpoint(case: Case, out: Path) -> None:
    """Weights that fit, and the state of an optimizer that does not."""
    torch.set_num_threads(1)
    module = SCENARIOS["plain"]()[0]
    states = torch.optim.SGD([torch.nn.Parameter(torch.ones(3))], lr=0.1).state_dict()
    path = out / f"another{os.environ['LOCAL_RANK']}.ckpt"
    extras = {"epoch": 0, "global_step": 0, "pytorch-lightning_version": L.__version__, "loops": None, "callbacks": {}}
    torch.save({"state_dict": module.state_dict(), "optimizer_states": [states], "lr_schedulers": [], **extras}, path)
    fit("plain", ReplicaZeroStrategy(), case.devices, load=str(path))


def broken_shards(case: Case, out: Path) -> None:
    torch.set_num_threads(1)
    strategy = ReplicaZeroStrategy(state_dict_type="sharded")
    fit("plain", strategy, case.devices, save=out / "shards")
    if os.environ["LOCAL_RANK"] == "0":
        data = next((out / "shards").glob("*.distcp"))
        data.write_bytes(data.read_bytes()[:-7])
    strategy.barrier()
    fit("plain", ReplicaZeroStrategy(), case.devices, load=str(out / "shards"))


def other_optimizers(case: Case, out: Path) -> None:
    def on_train_batch_end(self: Any, *_: Any) -> None:
        self.trainer.strategy.optimizers = [torch.optim.SGD(self.parameters(), lr=0.1)]

    job.Model.on_train_batch_end = on_train_batch_end  # type: ignore[method-assign, assignment]
    job.run(case, out)


@pytest.mark.parametrize(
    ("target", "message"),
    [
        (lbfgs, "`replica_zero` cannot shard LBFGS"),
        (
            another_model,
            r"the model's parameter 'last.weight': \(1, 24\) float32 on rank 0; \(2, 24\)",
        ),
        (other_replicas, "Ranks disagree on replicas: 1 on rank 0; 2 on rank 1. Start every rank from the same script"),
        (other_versions, r'Ranks disagree on torch: "1.0" on rank 0; "2'),
        (other_lightning, r'Ranks disagree on lightning: "1.0" on rank 0; "2'),
        (anothers_checkpoint, r"optimizer has param groups of \[1\] parameters, but this model's AdamW has \[4\]"),
        (broken_shards, r"shards cannot be used: __0_0\.distcp has \d+ bytes"),
        (nothing_to_train, "There is no parameter to train"),
    ],
)
def test_a_fit_refuses(target: Any, message: str, tmp_path: Path) -> None:
    outcome = world.run(Case(devices=2, clip=None, accumulate=1), tmp_path, target=target)
    assert outcome.code == 1
    tell = {line.split("]")[0] for line in outcome.logs.splitlines() if re.search(message, line)}
    assert len(tell) == 1, outcome.logs  # one rank says so, for all
    assert re.search(message, outcome.said[0])


def test_other_optimizers_in_training_are_refused(tmp_path: Path) -> None:
    outcome = world.run(Case(devices=2, clip=None, accumulate=1), tmp_path, target=other_optimizers)
    assert outcome.code == 1
    assert "other optimizers in training: SGD, in place of TornAdamW. `replica_zero` shards" in outcome.logs


def fit_again(case: Case, out: Path) -> None:
    try:
        job.run(case, out)
    except job.Injected:
        job.run(case, out)


def test_a_second_fit_after_a_failed_one(tmp_path: Path) -> None:
    faults = tuple(Fault("exception", rank, "backward", 1) for rank in range(2))
    outcome = world.run(Case(faults=faults, devices=2), tmp_path, target=fit_again)
    assert outcome.code == 1
    assert "An earlier fit in this process has failed" in outcome.logs
    assert "Every rank raised an exception in the same step" in outcome.logs


def other_devices(case: Case, out: Path) -> None:
    job.run(case, out)
    job.run(replace(case, replicas=1), out)


def test_another_grid_in_the_same_script(tmp_path: Path) -> None:
    outcome = world.run(Case(devices=2), tmp_path, target=other_devices)
    assert outcome.code == 1
    assert "2 ranks and replicas=2, but this one asks for 2 ranks and replicas=1" in outcome.logs


def fit_twice(case: Case, out: Path) -> None:
    job.run(case, out)
    job.run(case, out)


def test_two_fits_in_one_script(tmp_path: Path) -> None:
    """Each begins from the seed, so the second ends where the first did."""
    once = world.run(Case(devices=2), tmp_path / "once")
    twice = world.run(Case(devices=2), tmp_path / "twice", target=fit_twice)
    assert twice.code == 0, twice.logs
    assert [rank["weights"] for rank in twice.ranks] == [rank["weights"] for rank in once.ranks]


def fewer_devices(case: Case, out: Path) -> None:
    """A second trainer, which is to predict on one rank."""
    job.run(case, out)
    L.Trainer(accelerator="cpu", devices=1, strategy=ReplicaZeroStrategy(replicas=1), logger=False)


def test_fewer_devices_in_the_same_script(tmp_path: Path) -> None:
    outcome = world.run(Case(devices=2), tmp_path, target=fewer_devices)
    assert outcome.code == 1
    assert "ConfigurationError: This trainer asks for 1 rank, but this script runs with 2" in outcome.logs
    assert 'Trainer(devices=1, strategy="auto")' in outcome.logs
    assert "IndexError" not in outcome.logs  # on rank 1; whichever rank is first ends the run
