"""What is left of a run that cannot go on."""

from pathlib import Path
from typing import Any

import lightning.pytorch as pl

from lightning_replica import checks
from lightning_replica.callbacks.run_directory import RunDirectory


class DyingGaspCheckpoint(RunDirectory):
    """Has whoever is left write a complete checkpoint when the run cannot go on, and end.

    That is when a rank is lost and cannot be replaced, when recovery fails, when every rank raises, and when the run is
    told to end: SIGTERM, SIGINT (Ctrl-C) or SIGUSR1, at the supervisor or at any rank. At most the step in flight is
    lost. The process ends with an exit code of `lightning_replica.exit_codes`; go on with
    ``trainer.fit(model, ckpt_path="last")``, or ``ReplicaZeroStrategy(resume="auto")`` and the same command. The third
    run in a row that fails at one step ends with a code that says not to (`exit_codes.NO_PROGRESS`).

    Args:
        dirpath: Directory of the run's checkpoints, or its URL ("s3://bucket/run"); this one is
            ``step_<global step>`` there, in the sharded form.
        grace_s: How long ranks have from a signal until they are killed, in seconds: half of it to come to the end of
            their step, the rest to write. Choose a little less than your scheduler grants.

    Raises:
        ConfigurationError: If a value makes no sense; at the start of ``fit``, if the directory cannot be written to
            or the strategy is another.
    """

    def __init__(self, dirpath: str | Path, grace_s: float = 25.0) -> None:
        super().__init__(dirpath)
        checks.seconds(grace_s=grace_s)
        self.recovery_options: dict[str, Any] = {"gasp": True, "grace_s": grace_s}

    def on_fit_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """From here on there is something to save."""
        super().on_fit_start(trainer, pl_module)
        strategy: Any = trainer.strategy
        strategy.gasps_to(self.directory)
