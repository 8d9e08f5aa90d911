"""The checkpoint that survivors write when a run cannot continue."""

from pathlib import Path
from typing import Any

from lightning_replica._compat.lightning_names import pl
from lightning_replica.callbacks.run_directory import RunDirectory
from lightning_replica.core import checks


class DyingGaspCheckpoint(RunDirectory):
    """Makes the survivors write a complete checkpoint and shut down when the run cannot continue.

    This happens when a rank is lost and cannot be replaced, when recovery fails, when every rank raises, and when the
    supervisor or any rank receives SIGTERM, SIGINT (Ctrl-C) or SIGUSR1, or the supervisor SIGHUP, as from a terminal
    that is closed. At most the step in flight is lost. The process ends with an exit code of
    `lightning_replica.exit_codes`. To resume, call ``trainer.fit(model, ckpt_path="last")``, or use
    ``ReplicaZeroStrategy(resume="auto")`` and the same command. The third run in a row that fails at one step
    ends with a code that says not to resume (`exit_codes.NO_PROGRESS`).

    Args:
        dirpath: Directory of the run's checkpoints, or its URL ("s3://bucket/run"); this checkpoint
            is ``step_<global step>`` there, in the sharded form.
        grace_s: Time from a signal until the ranks are killed, in seconds: half of it to reach the end of their step,
            the rest to write. Choose a little less than your scheduler grants.

    Raises:
        ConfigurationError: If a value is invalid; at the start of ``fit``, if the directory cannot be written to or
            the trainer has another strategy.
    """

    def __init__(self, dirpath: str | Path, grace_s: float = 25.0) -> None:
        super().__init__(dirpath)
        checks.seconds(grace_s=grace_s)
        self.recovery_options: dict[str, Any] = {"gasp": True, "grace_s": grace_s}

    def on_fit_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Prepare the directory, and make the strategy write the dying gasp there from now on."""
        super().on_fit_start(trainer, pl_module)
        self._run_checkpoints(trainer).gasp_to(self.directory)
