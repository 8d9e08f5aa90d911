"""The checkpoints that callbacks of a fit write: periodic ones, those that a user asks for, and the dying gasp."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict
from functools import partial
from typing import Any

from lightning_replica._compat.lightning_names import pl
from lightning_replica.checkpoint.directory import CheckpointDirectory, examine
from lightning_replica.checkpoint.location import Location
from lightning_replica.checkpoint.manifest import Lineage
from lightning_replica.core.messages import say
from lightning_replica.core.points import begin
from lightning_replica.errors import CheckpointError, CollectiveError
from lightning_replica.recovery.diagnosis import fault_behind
from lightning_replica.trainer.saving.checkpoints import Checkpoints
from lightning_replica.trainer.saving.dying_gasp import DyingGasp
from lightning_replica.trainer.saving.occupation import occupy
from lightning_replica.trainer.saving.which_checkpoint import begin_run, fit_number
from lightning_replica.trainer.session import Session
from lightning_replica.trainer.steps import Training


class RunCheckpoints:
    """Writes sharded checkpoints of one fit, whatever form the other checkpoints of the run have.

    Args:
        trainer: The trainer that fits.
        training: The fit.
        session: The session of this process.
        checkpoints: Writes checkpoints.
        broadcast: Returns rank 0's object on every rank.
    """

    def __init__(
        self,
        trainer: pl.Trainer,
        training: Training,
        session: Session,
        checkpoints: Checkpoints,
        broadcast: Callable[[Any], Any],
    ) -> None:
        self._trainer = trainer
        self._training = training
        self._session = session
        self._checkpoints = checkpoints
        self._broadcast = broadcast

    def save(self, path: Location) -> None:
        """Write a checkpoint. Collective.

        Raises:
            CheckpointError: On every rank, if one rank could not write.
            CollectiveError: If a device's fault or a lost rank is the reason. The run must recover from that.
        """
        with self._faults_of_saving():
            self._checkpoints.save_periodic(self._trainer, self._training, path)

    def save_async(self, path: Location) -> None:
        """Begin to write a checkpoint, and return once its data is copied. Collective. See `settle`."""
        with self._faults_of_saving():
            self._checkpoints.save_periodic(
                self._trainer, self._training, path, store_barrier=self._session.world.store_barrier()
            )

    def settle(self, path: Location) -> bool:
        """Wait for the checkpoint that `save_async` has begun. Collective.

        Returns:
            Whether there is a whole checkpoint at ``path``. There is none if a rank was lost before it was complete.

        Raises:
            CheckpointError: On every rank, if one rank could not write.
        """
        begin("checkpoint")
        failed = self._checkpoints.settle(self._training.check)
        found = None
        if self._trainer.is_global_zero:  # rank 0 may be a replacement, so it looks at the disk
            found = str(failed) if isinstance(failed, CheckpointError) else "", examine(path).problem is None
        raised, whole = self._broadcast(found)
        if raised:
            raise CheckpointError(raised)
        return bool(whole)

    def publish_to(self, directory: CheckpointDirectory, keep_last: int | None) -> None:
        """Make the tracker of ``directory`` name every checkpoint that appears there. See `CheckpointPublisher`.

        A checkpoint that a user asks for is also written there; of several directories, to the first.

        Raises:
            ConfigurationError: On every rank, if the run cannot write there; see `occupation`.
        """
        lineage = self._checkpoints.lineage_in(directory.path)
        if lineage is None or lineage.fit != fit_number():  # the first of the callbacks with this directory
            lineage = self._occupy(directory)
        self._checkpoints.publish_to(directory, keep_last, lineage)
        if not self._session.is_replacement:  # it joins when the others are past this
            self._checkpoints.report_what_is_left_out(self._trainer)
        self._session.ending.leave_directory(str(directory.path))
        self._training.save_on_request(partial(self._save_planned, directory))

    def _occupy(self, directory: CheckpointDirectory) -> Lineage:
        occupy(directory, self._checkpoints.directories_of(fit_number()), self._session, self._broadcast)
        begun = None
        if self._trainer.is_global_zero and not self._session.is_replacement:
            begun = asdict(begin_run(self._trainer, directory))
        return Lineage.of_plain(self._broadcast(begun))

    def _save_planned(self, directory: CheckpointDirectory) -> None:
        path = directory.path_of(self._trainer.global_step)
        said = f"{path} is written, as asked."
        try:
            with self._faults_of_saving():
                self._checkpoints.save_periodic(self._trainer, self._training, path, "planned")
        except CheckpointError as error:  # on every rank
            said = f"the checkpoint that was asked for could not be written: {error} Training continues; ask again."
        if self._trainer.is_global_zero:
            say(said)

    def gasp_to(self, directory: CheckpointDirectory) -> None:
        """Set ``directory`` as the place of the dying gasp, if the run cannot continue. See `DyingGaspCheckpoint`."""
        gasp = DyingGasp(
            self._trainer,
            self._training,
            self._checkpoints,
            self._session.mirrors,
            directory,
            self._session.rank,
            self._session.ending.has_gasped,
        )
        self._training.last_save.write_with(gasp.write)

    @contextmanager
    def _faults_of_saving(self) -> Iterator[None]:
        """Raise `CollectiveError` in place of a `CheckpointError` that a device's fault or a lost rank has caused."""
        try:
            yield
        except CheckpointError as error:
            if fault_behind(error, self._training.device) is not None:
                raise CollectiveError(str(error)) from error
            raise
