"""Options of recovery, from arguments and from callbacks."""

from dataclasses import fields
from typing import Any

import lightning as L
import pytest
from hydra.utils import instantiate

from lightning_replica import (
    ConfigurationError,
    PeerRepair,
    RankReplacement,
    RecoveryReport,
    ReplicaZeroStrategy,
    StepRollback,
)
from lightning_replica.core.options import RecoveryOptions
from tests.callbacks.test_off import Plain


def options(strategy: ReplicaZeroStrategy, *callbacks: L.Callback) -> RecoveryOptions:
    trainer = L.Trainer(
        strategy=strategy,
        accelerator="cpu",
        devices=2,
        callbacks=list(callbacks),
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
    )
    return strategy.options_for(trainer)


def test_callbacks_and_arguments_say_the_same() -> None:
    levels = (
        StepRollback(max_tries=5),
        PeerRepair(guard="full"),
        RankReplacement(max_restarts=9, standby=1, hang_min_s=7),
    )
    assert options(ReplicaZeroStrategy(), *levels) == RecoveryOptions(
        max_tries=5, guard="full", max_restarts=9, standby=1, hang_min_s=7
    )
    assert options(ReplicaZeroStrategy(max_tries=5), StepRollback(5)).max_tries == 5
    assert options(ReplicaZeroStrategy(max_restarts=0), StepRollback(5)).max_restarts == 0
    assert options(ReplicaZeroStrategy(recovery=False), RecoveryReport()).recovery is False


def test_together_the_callbacks_have_every_option_with_its_default() -> None:
    said = StepRollback().recovery_options | PeerRepair().recovery_options | RankReplacement().recovery_options
    default, others = RecoveryOptions(), {"recovery", "gasp", "grace_s"}  # the last two are DyingGaspCheckpoint's
    assert said == {f.name: getattr(default, f.name) for f in fields(default) if f.name not in others}


@pytest.mark.parametrize(
    ("arguments", "callbacks", "message"),
    [
        (
            {"max_tries": 4},
            [StepRollback(5)],
            "strategy sets max_tries=4, but the callback StepRollback sets max_tries=5",
        ),
        (
            {"max_restarts": 0},
            [RankReplacement()],
            "strategy sets max_restarts=0, but the callback RankReplacement sets max_restarts=3",
        ),
        ({}, [StepRollback(4), StepRollback(5)], "Two callbacks set max_tries: StepRollback to 4, StepRollback to 5"),
        ({"recovery": False}, [PeerRepair()], "recovery=False, but the callback PeerRepair configures recovery"),
    ],
)
def test_contradictions(arguments: dict[str, Any], callbacks: list[Any], message: str) -> None:
    strategy = ReplicaZeroStrategy(**arguments)
    trainer = L.Trainer(
        strategy=strategy,
        accelerator="cpu",
        devices=2,
        callbacks=callbacks,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
    )
    with pytest.raises(ConfigurationError, match=message):
        strategy.options_for(trainer)  # as each rank does when it launches


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        (lambda: StepRollback(max_tries=0), "max_tries=0 must be a whole number, 1 or more"),
        (
            lambda: PeerRepair(guard="most"),  # type: ignore[arg-type]
            "guard='most' must be one of 'sampled', 'full', 'off'",
        ),
        (lambda: RankReplacement(standby=-1), "standby=-1 must be a whole number, 0 or more"),
        (lambda: RankReplacement(hang_max_s=0), "hang_max_s=0 must be a number of seconds, more than 0"),
        (lambda: RankReplacement(hang_min_s=9, hang_max_s=8), "hang_min_s=9 must not be more than hang_max_s=8"),
        (
            lambda: ReplicaZeroStrategy(recovery="no"),  # type: ignore[arg-type]
            "recovery='no' must be one of True, False",
        ),
        (lambda: ReplicaZeroStrategy(max_tries=0), "max_tries=0 must be a whole number, 1 or more"),
    ],
)
def test_values_that_make_no_sense(wrong: Any, message: str) -> None:
    with pytest.raises(ConfigurationError, match=message):
        wrong()


def test_two_reports_to_one_file(tmp_path: Any) -> None:
    trainer = L.Trainer(
        accelerator="cpu",
        callbacks=[RecoveryReport(tmp_path / "a"), RecoveryReport(tmp_path / "a")],
        max_steps=1,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
    )
    with pytest.raises(ConfigurationError, match="Two RecoveryReport callbacks write to"):
        trainer.fit(Plain(), [])


def test_from_hydra_and_from_lightning_cli(monkeypatch: pytest.MonkeyPatch) -> None:
    made = instantiate(
        [
            {"_target_": "lightning_replica.RankReplacement", "standby": 2},
            {"_target_": "lightning_replica.StepRollback", "max_tries": 4},
        ]
    )
    assert options(ReplicaZeroStrategy(), *made) == RecoveryOptions(standby=2, max_tries=4)
    from lightning.pytorch.cli import LightningCLI

    class_path = "lightning_replica.RankReplacement"
    arguments = {
        "trainer": {
            "strategy": "replica_zero",
            "accelerator": "cpu",
            "devices": 2,
            "logger": False,
            "callbacks": [{"class_path": class_path, "init_args": {"standby": 2}}],
        }
    }
    monkeypatch.setattr("sys.argv", ["train.py"])
    monkeypatch.setenv("JSONARGPARSE_DEPRECATION_WARNINGS", "off")  # Lightning's own call
    cli = LightningCLI(Plain, run=False, args=arguments, save_config_callback=None, seed_everything_default=False)
    strategy = cli.trainer.strategy
    assert isinstance(strategy, ReplicaZeroStrategy)
    assert strategy.options_for(cli.trainer).standby == 2
