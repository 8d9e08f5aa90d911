"""The base class of callbacks that write to the directory of a run's checkpoints."""

from pathlib import Path

from lightning_replica._compat.lightning_names import Callback, pl, rank_zero_only
from lightning_replica.checkpoint.directory import CheckpointDirectory
from lightning_replica.checkpoint.location import Location, absolute
from lightning_replica.core.messages import warn
from lightning_replica.core.runtime import directory_of_this_start
from lightning_replica.trainer.saving.run_checkpoints import RunCheckpoints
from lightning_replica.trainer.strategy import replica_strategy


class RunDirectory(Callback):
    """Base class that checks, when a fit begins, that the directory of the run can be written to.

    Args:
        dirpath: The directory, or its URL in a store that fsspec reaches ("s3://bucket/run"); see
            docs/checkpoints.md for what is in it.
        keep_last: How many checkpoints to keep there; None leaves this to the other callbacks.

    Attributes:
        directory: ``dirpath`` as a `CheckpointDirectory`.

    Raises:
        ConfigurationError: At the start of ``fit``, on every rank, if the directory cannot be written to, another run
            writes to it, some rank does not see it, or the trainer has another strategy. At once, if ``dirpath`` is a
            URL that no installed package can reach.
    """

    def __init__(self, dirpath: str | Path, keep_last: int | None = None) -> None:
        self.directory = CheckpointDirectory(absolute(dirpath))
        self._keep_last = keep_last
        if rank_zero_only.rank == 0:  # type: ignore[attr-defined]
            _warn_if_of_this_start(self.directory.path)

    def setup(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        """Raise an error for other strategies, which would never write to the directory."""
        replica_strategy(trainer, self)

    def on_fit_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Check the directory, and write checkpoints to it."""
        self._run_checkpoints(trainer).publish_to(self.directory, self._keep_last)

    def _run_checkpoints(self, trainer: pl.Trainer) -> RunCheckpoints:
        return replica_strategy(trainer, self).run_checkpoints


def _warn_if_of_this_start(path: Location) -> None:
    """Tell the user in the first process: the ranks that it starts get Hydra's directory as a fixed name."""
    made = directory_of_this_start()
    if made is not None and isinstance(path, Path) and path.is_relative_to(made):
        warn(
            f"dirpath={str(path)!r} is in the directory that Hydra has made for this start, so the same command, when"
            " started again, finds no checkpoint there. Give a dirpath elsewhere, or set hydra.run.dir to a name"
            " without the time."
        )
