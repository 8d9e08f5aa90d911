"""Ranks that train with different hyperparameters: not wrong bits, but what the user's metric made of a scheduler."""

from pathlib import Path
from typing import Any

from tests.support import job, world
from tests.support.job import Case


def apart(case: Case, out: Path) -> None:
    def follow_own(self: Any) -> None:
        """The metric that the scheduler follows becomes better on rank 0 and worse on rank 1."""
        self.log("own_sum", float(self.current_epoch * (2 * self.global_rank - 1)))

    job.Model.on_train_epoch_end = follow_own  # type: ignore[method-assign]
    job.run(case, out)


def test_learning_rates_that_differ_are_named(tmp_path: Path) -> None:
    outcome = world.run(Case(devices=2, epochs=4), tmp_path, target=apart)
    assert outcome.code != 0
    said = next(line for line in outcome.logs.splitlines() if "different settings" in line)
    assert "lr of optimizer 0 is " in said
    assert " on rank 0 and " in said
    assert "sync_dist=True" in said
    assert "weight_decay" not in said
    assert "none of them is known to be right. Resume" not in outcome.logs
