"""What is left of a run that cannot go on."""

from pathlib import Path
from typing import Any

import lightning.pytorch as pl
from lightning.pytorch.callbacks import Checkpoint

from lightning_replica import checks
from lightning_replica.errors import ConfigurationError


class DyingGaspCheckpoint(Checkpoint):
    """Has whoever is left write a complete checkpoint when the run cannot go on, and end.

    That is when a rank is lost and cannot be replaced, when recovery fails, when every rank raises, and when the run is
    told to end: SIGTERM, SIGINT (Ctrl-C) or SIGUSR1, at the supervisor or at any rank. At most the step in flight is
    lost. The process ends with an exit code of `lightning_replica.exit_codes`.

    Args:
        dirpath: Directory of the run's checkpoints; this one is ``step_<global step>`` there, in the sharded form.
        grace_s: How long ranks have from a signal until they are killed, in seconds: half of it to come to the end of
            their step, the rest to write. Choose a little less than your scheduler grants.

    Raises:
        ConfigurationError: If a value makes no sense; at the start of ``fit``, with another strategy.
    """

    def __init__(self, dirpath: str | Path, grace_s: float = 25.0) -> None:
        checks.seconds(grace_s=grace_s)
        self.dirpath, self.grace_s = Path(dirpath), grace_s
        self.recovery_options: dict[str, Any] = {"gasp": True, "grace_s": grace_s}

    def setup(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        """Refuses other strategies, which would never call it."""
        if not hasattr(trainer.strategy, "gasp_to"):
            raise ConfigurationError(
                f"DyingGaspCheckpoint needs `Trainer(strategy='replica_zero')`; this one has"
                f" {type(trainer.strategy).__name__}. Leave the callback out, or change the strategy."
            )

    def on_fit_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """From here on there is something to save."""
        strategy: Any = trainer.strategy
        strategy.gasp_to(self.dirpath)
