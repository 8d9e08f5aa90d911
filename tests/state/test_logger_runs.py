import csv
import json
from contextlib import suppress
from pathlib import Path
from typing import Any, ClassVar

import lightning as L
import pytest
from lightning.pytorch.callbacks import LearningRateMonitor
from lightning.pytorch.loggers import CSVLogger, Logger, TensorBoardLogger

from lightning_replica.errors import RecoveryError
from lightning_replica.state import logger_runs
from tests.support import job, world
from tests.support.job import Case, Fault


def loggers(out: Path) -> list[Logger]:
    made: list[Logger] = [CSVLogger(out, name="csv", flush_logs_every_n_steps=1000)]
    with suppress(ModuleNotFoundError):  # an optional dependency of Lightning
        made.append(TensorBoardLogger(out, name="tensorboard"))
    return made


def train(case: Case, out: Path) -> None:
    original = L.Trainer

    def trainer(**options: Any) -> L.Trainer:
        callbacks = [LearningRateMonitor("step"), *options["callbacks"]]
        return original(**{**options, "callbacks": callbacks, "logger": loggers(out)})

    L.Trainer = trainer  # type: ignore[misc,assignment]
    job.run(case, out)


def rows(out: Path) -> list[dict[str, str]]:
    with (out / "csv" / "version_0" / "metrics.csv").open() as file:
        return list(csv.DictReader(file))


def test_a_replaced_rank_0_goes_on_in_the_same_run(tmp_path: Path) -> None:
    untouched = world.run(Case(devices=2, accumulate=1), tmp_path / "untouched", target=train)
    faults = (Fault("kill", 0, "backward", 3), Fault("kill", 0, "before_commit", 10), Fault("kill", 1, "update", 5))
    killed = world.run(Case(faults, devices=2, accumulate=1), tmp_path / "killed", target=train)
    killed.assert_same(untouched)
    assert len(killed.said) == 3
    assert rows(tmp_path / "killed") == rows(tmp_path / "untouched")
    assert len(rows(tmp_path / "killed")) > 20
    for folder in (tmp_path / "untouched", tmp_path / "killed"):
        versions = {str(path.relative_to(folder)) for path in folder.glob("*/version_*")}
        assert versions == {f"{logger.name}/version_0" for logger in loggers(folder)}


class Remote(Logger):
    """What loggers of remote services have in common."""

    name = "remote"

    def __init__(self, **attributes: Any) -> None:
        super().__init__()
        vars(self).update(attributes)

    @property
    def version(self) -> str | None:
        return getattr(self, "run", None) or getattr(self, "_id", None)

    def log_metrics(self, metrics: Any, step: int | None = None) -> None:
        raise NotImplementedError

    def log_hyperparams(self, params: Any) -> None:
        raise NotImplementedError


def test_ids_of_remote_runs() -> None:
    wandb = Remote(_wandb_init={"id": None, "resume": "never"}, _id=None, run="abc")
    others = [Remote(_run_id="m1", _experiment_id="7"), Remote(_experiment_key="k"), Remote(_version=4)]
    recorded = json.loads(json.dumps(logger_runs.record([wandb, *others])))
    fresh = [
        Remote(_wandb_init={"id": None, "resume": "never"}, _id=None),
        Remote(_run_id=None, _experiment_id=None),
        Remote(_experiment_key=None),
        Remote(_version=None),
    ]
    logger_runs.adopt(fresh, recorded, writes=True)
    assert vars(fresh[0]) == {"_wandb_init": {"id": "abc", "resume": "allow"}, "_id": "abc"}
    assert [vars(logger) for logger in fresh[1:]] == [vars(logger) for logger in others]


def test_other_loggers_than_the_last_time(tmp_path: Path) -> None:
    recorded = logger_runs.record([CSVLogger(tmp_path)])
    with pytest.raises(RecoveryError, match=r"loggers \['Remote'\], but its predecessor had \['CSVLogger'\]"):
        logger_runs.adopt([Remote()], recorded, writes=True)


class Touchy:
    """Like `torch.distributed.reduce_op`, which warns that it is deprecated whatever attribute is read."""

    asked: ClassVar[list[str]] = []

    def __getattribute__(self, name: str) -> Any:
        Touchy.asked.append(name)
        return object.__getattribute__(self, name)


def test_no_object_is_asked_for_an_attribute() -> None:
    touchy = Touchy()
    assert isinstance(touchy, Touchy)
    assert not isinstance(touchy, Logger)
    assert Touchy.asked, "isinstance asks an object that is not of the class for its `__class__`"
    Touchy.asked.clear()
    logger_runs.hand_over()
    assert Touchy.asked == []
