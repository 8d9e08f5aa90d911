"""The checkpoint methods that Lightning calls on a strategy, and those that this strategy adds."""

import logging
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from functools import partial
from typing import Any

from torch import Tensor
from torch.optim import Optimizer

from lightning_replica._compat.lightning import after_saves, writes_archives
from lightning_replica._compat.lightning_names import TrainerFn, pl
from lightning_replica.checkpoint.archive import can_be_checked, check_archive, reading
from lightning_replica.checkpoint.directory import CheckpointDirectory, examine, exists
from lightning_replica.checkpoint.location import Location, locate
from lightning_replica.checkpoint.manifest import Lineage
from lightning_replica.core.messages import say, warn
from lightning_replica.core.points import begin
from lightning_replica.errors import CheckpointError, CollectiveError, ReplicaError
from lightning_replica.recovery.diagnosis import fault_behind
from lightning_replica.state.snapshot import Snapshot
from lightning_replica.trainer.lightning_collectives import LightningCollectives
from lightning_replica.trainer.saving.checkpoints import Checkpoints, absent, is_absent
from lightning_replica.trainer.saving.dying_gasp import DyingGasp
from lightning_replica.trainer.saving.left_out import left_out
from lightning_replica.trainer.saving.occupation import occupy
from lightning_replica.trainer.saving.which_checkpoint import begin_run, fit_number
from lightning_replica.trainer.steps import Training

log = logging.getLogger(__name__)


class LightningCheckpoints(LightningCollectives):
    """Saves and loads checkpoints of either form, full or sharded."""

    _checkpoints: Checkpoints
    _training: Training | None
    _reported_left_out: Sequence[str] = ()

    @property
    def training(self) -> Training:
        """The current fit, which exists only while fitting."""
        if self._training is None:
            raise ReplicaError("There is no sharded state: it exists only while fitting.")
        return self._training

    def optimizer_state(self, optimizer: Optimizer) -> dict[str, Any]:
        """Return the whole state of an optimizer, in torch's format, on rank 0. Collective."""
        if self._is_replacement or self._is_cut_off:
            return {}
        return self._checkpoints.optimizer_state(self.training, optimizer)

    def load_optimizer_state_dict(self, checkpoint: Mapping[str, Any]) -> None:
        """Load this rank's part of the optimizer states. A replacement gets it from a peer instead."""
        if not self._is_replacement and self.lightning_module is not None:
            self._checkpoints.load_optimizers(self.training, self.lightning_module, checkpoint)

    def load_checkpoint(self, checkpoint_path: Any, weights_only: bool | None = None) -> dict[str, Any]:
        """Read a checkpoint of either form.

        Raises:
            CheckpointError: If it is damaged.
        """
        path = locate(checkpoint_path)
        if self._is_replacement and not exists(path):
            return absent(path)
        opened = self._checkpoints.open(path, self._is_fitting)
        if opened is not None:
            return opened
        # Another plugin checks what it has written by itself; a replacement gets its state from a peer.
        if writes_archives(self.checkpoint_io) and not self._is_replacement and can_be_checked(path):
            check_archive(path)
        with reading(path):
            return super().load_checkpoint(checkpoint_path, weights_only)

    def load_model_state_dict(self, checkpoint: Mapping[str, Any], strict: bool = True) -> None:
        """Load the weights, unless they come with the optimizers' shards or from a peer."""
        from_a_peer = self._is_replacement and (self._is_fitting or is_absent(checkpoint))
        if not self._checkpoints.is_open and not from_a_peer:
            super().load_model_state_dict(checkpoint, strict)

    def resumption(self, trainer: pl.Trainer) -> Snapshot | None:
        """Return where the fit resumes; None if no checkpoint has been loaded."""
        return self._checkpoints.resumption(trainer, self.session)

    def lightning_module_state_dict(self) -> dict[str, Any]:
        """Return the weights, on rank 0 as copies: with views, the whole flat buffer would be saved."""
        begin("checkpoint")  # Lightning calls this method first when it saves a checkpoint; user hooks follow
        if self._checkpoints.is_sharded(self._training):
            return self._checkpoints.stand_in()
        state = super().lightning_module_state_dict()
        if not self.is_global_zero:
            return state
        return {k: v.detach().clone() if isinstance(v, Tensor) else v for k, v in state.items()}

    def save_checkpoint(self, checkpoint: dict[str, Any], filepath: Any, storage_options: Any | None = None) -> None:
        """Write a checkpoint in the form of ``state_dict_type``. A replacement that has not joined yet writes none."""
        if self._is_replacement:
            return
        if self._is_cut_off:
            if self.is_global_zero:
                log.warning(
                    "%s is not written: the run has failed, and ranks can no longer get each other's shards. To save"
                    " what is left in such a case, add the callback `DyingGaspCheckpoint`.",
                    filepath,
                )
            return
        if self._training is not None and self.lightning_module is not None:
            self._training.records.files.is_written(filepath)
            self._checkpoints.complete(self.lightning_module.trainer, self.training, checkpoint)
            if self._checkpoints.is_sharded(self._training):
                self._checkpoints.save_sharded(self.training, self.lightning_module, checkpoint, locate(filepath))
                return
        super().save_checkpoint(checkpoint, filepath, storage_options)

    @property
    def _is_replacement(self) -> bool:
        """Whether this is a replacement that has not joined. Without a session, the module is saved as it is."""
        return self._session is not None and self._session.is_replacement

    @property
    def _is_cut_off(self) -> bool:
        return self._session is not None and self._session.world.is_over and self.world_size > 1

    def remove_checkpoint(self, filepath: Any) -> None:
        """Remove a checkpoint, after all that is still being written: that one is to take its place.

        A replacement that has not joined yet removes none.
        """
        if not self._is_replacement:
            if self._training is not None:
                self._training.records.files.is_removed(filepath)
            after_saves(self.checkpoint_io, partial(super().remove_checkpoint, filepath))

    def save_periodic(self, path: Location) -> None:
        """Write a sharded checkpoint, whatever form the others have. Collective.

        Raises:
            CheckpointError: On every rank, if one rank could not write.
            CollectiveError: If a device's fault or a lost rank is the reason. The run must recover from that.
        """
        trainer, training = self._fitting()
        with self._faults_of_saving():
            self._checkpoints.save_periodic(trainer, training, path)

    def save_async(self, path: Location) -> None:
        """Begin to write a sharded checkpoint, and return once its data is copied. Collective. See `settle_save`."""
        trainer, training = self._fitting()
        with self._faults_of_saving():
            self._checkpoints.save_periodic(trainer, training, path, store_barrier=self.session.world.store_barrier())

    def settle_save(self, path: Location) -> bool:
        """Wait for the checkpoint that `save_async` has begun. Collective.

        Returns:
            Whether there is a whole checkpoint at ``path``. There is none if a rank was lost before it was complete.

        Raises:
            CheckpointError: On every rank, if one rank could not write.
        """
        _, training = self._fitting()
        begin("checkpoint")
        failed = self._checkpoints.settle(training.check)
        found = None
        if self.is_global_zero:  # rank 0 may be a replacement, so it looks at the disk
            found = str(failed) if isinstance(failed, CheckpointError) else "", examine(path).problem is None
        raised, whole = self.broadcast(found)
        if raised:
            raise CheckpointError(raised)
        return bool(whole)

    def publishes_to(self, directory: CheckpointDirectory, keep_last: int | None) -> None:
        """Make the tracker of ``directory`` name every checkpoint that appears there. See `CheckpointPublisher`.

        A checkpoint that a user asks for is also written there; of several directories, to the first.

        Raises:
            ConfigurationError: On every rank, if the run cannot write there; see `occupation`.
        """
        trainer, training = self._fitting()
        lineage = self._checkpoints.lineage_in(directory.path)
        if lineage is None or lineage.fit != fit_number():  # the first of the callbacks with this directory
            occupy(directory, self._checkpoints.directories_of(fit_number()), self.session, self.broadcast)
            begun = None
            if self.is_global_zero and not self._is_replacement:
                begun = asdict(begin_run(trainer, directory))
            lineage = Lineage.of_plain(self.broadcast(begun))
        self._checkpoints.publish_to(directory, keep_last, lineage)
        self._report_what_is_left_out(trainer)
        self.session.ending.leave_directory(str(directory.path))
        training.save_on_request(partial(self._save_planned, trainer, training, directory))

    def _report_what_is_left_out(self, trainer: pl.Trainer) -> None:
        """Say at the start of a fit what its sharded checkpoints will lack, once. On all ranks.

        A callback's ``state_dict`` may be collective. A replacement joins when the others are past this.
        """
        left = [] if self._is_replacement else left_out(trainer)
        if trainer.is_global_zero and left and left != self._reported_left_out:
            self._reported_left_out = left
            warn(
                f"checkpoints in directories hold tensors and plain data only, and lack: {'; '.join(left)}."
                " A run that starts again needs none of it. `save_hyperparameters(ignore=[...])` leaves hyperparameters"
                " out everywhere; for `load_from_checkpoint`, pass them as arguments."
            )

    def _save_planned(self, trainer: pl.Trainer, training: Training, directory: CheckpointDirectory) -> None:
        path = directory.path_of(trainer.global_step)
        said = f"{path} is written, as asked."
        try:
            with self._faults_of_saving():
                self._checkpoints.save_periodic(trainer, training, path, "planned")
        except CheckpointError as error:  # on every rank
            said = f"the checkpoint that was asked for could not be written: {error} Training continues; ask again."
        if trainer.is_global_zero:
            say(said)

    @contextmanager
    def _faults_of_saving(self) -> Iterator[None]:
        """Raise `CollectiveError` in place of a `CheckpointError` that a device's fault or a lost rank has caused."""
        try:
            yield
        except CheckpointError as error:
            if fault_behind(error, self.training.device) is not None:
                raise CollectiveError(str(error)) from error
            raise

    def gasps_to(self, directory: CheckpointDirectory) -> None:
        """Set ``directory`` as the place of the dying gasp, if the run cannot continue. See `DyingGaspCheckpoint`."""
        trainer, training = self._fitting()
        gasp = DyingGasp(
            trainer,
            training,
            self._checkpoints,
            self.session.mirrors,
            directory,
            self.global_rank,
            self.session.ending.has_gasped,
        )
        training.last_save.write_with(gasp.write)

    @property
    def _is_fitting(self) -> bool:
        return self.lightning_module is not None and self.lightning_module.trainer.state.fn == TrainerFn.FITTING

    def _fitting(self) -> tuple[pl.Trainer, Training]:
        if self.lightning_module is None:
            raise ReplicaError("There is no LightningModule: checkpoints are written while fitting.")
        return self.lightning_module.trainer, self.training
