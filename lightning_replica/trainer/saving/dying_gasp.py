"""One rank's part of the dying gasp, the last checkpoint of a run that cannot continue. See recovery/gasp.py."""

from collections.abc import Callable

from lightning_replica._compat.lightning_names import pl
from lightning_replica.checkpoint.barrier import Barrier
from lightning_replica.checkpoint.directory import CheckpointDirectory
from lightning_replica.core.messages import warn
from lightning_replica.core.points import reach
from lightning_replica.errors import CheckpointError, CollectiveError
from lightning_replica.recovery.diagnosis import fault_behind
from lightning_replica.recovery.gasp import GaspPlan
from lightning_replica.recovery.mirror import Mirrors
from lightning_replica.recovery.planner import Mirror
from lightning_replica.state.snapshot import Local, Private, Snapshot
from lightning_replica.trainer.saving import resume
from lightning_replica.trainer.saving.checkpoints import Checkpoints
from lightning_replica.trainer.steps import Training


class DyingGasp:
    """Writes one rank's part of the dying gasp.

    Args:
        trainer: The trainer that fits.
        training: The fit.
        checkpoints: Writes checkpoints.
        mirrors: Hold the peers' private states.
        directory: Where the checkpoint goes.
        rank: This rank.
        gasped: Called on one rank, with the step, once the checkpoint is published.
    """

    def __init__(
        self,
        trainer: pl.Trainer,
        training: Training,
        checkpoints: Checkpoints,
        mirrors: Mirrors,
        directory: CheckpointDirectory,
        rank: int,
        gasped: Callable[[int], None],
    ) -> None:
        self._trainer, self._training, self._checkpoints = trainer, training, checkpoints
        self._mirrors, self._directory, self._rank, self._gasped = mirrors, directory, rank, gasped

    def write(self, plan: GaspPlan) -> str:
        """Write what ``plan`` says. Collective over the ranks of the plan, which are the default group.

        Returns:
            The checkpoint's directory.

        Raises:
            CheckpointError: On every rank, if one rank could not write.
            CollectiveError: If one of the ranks is lost meanwhile, or a device fails.
        """
        try:
            return self._write(plan)
        except Exception as error:
            if fault_behind(error, self._training.device) is not None:
                raise CollectiveError(str(error)) from error
            raise

    def _write(self, plan: GaspPlan) -> str:
        taken = self._training.host.kept(plan.kind, plan.step)
        own = {rank: self._private(taken, rank) for rank in plan.privates[self._rank]}
        privates = {rank: each for given in Barrier(None).all(lambda: own) for rank, each in given.items()}
        self._training.state.params_from_main()  # of this rank's shard only: it writes no other
        self._training.host.put_back(taken)
        first = self._training.first_rank
        if first in privates:
            self._training.host.buffers.follow(Local.of(Private.unpack(privates[first])).buffers)
        state, world_size = self._training.state, self._trainer.world_size
        record = resume.record_last(
            self._trainer, state, self._training.host.outline(), taken, plan.commit, privates, world_size
        )
        step = self._step(taken)
        path = self._directory.path_of(step)
        self._checkpoints.save_last(self._trainer, self._training, record, path, step, plan.pieces[self._rank])
        reach("track")
        Barrier(None).run(lambda: self._track(path.name, step, plan))
        return str(path)

    def _track(self, name: str, step: int, plan: GaspPlan) -> None:
        if self._rank != plan.ranks[0]:
            return
        self._gasped(step)
        try:
            self._directory.track(name)
        except (CheckpointError, OSError) as error:  # for example, the checkpoint has filled the disk
            warn(f"{name} is written, but the tracker was not updated: {error}")

    def _private(self, taken: Snapshot, rank: int) -> bytes:
        if rank == self._rank:
            return bytes(self._training.host.saved(taken).private.pack())
        return self._mirrors.payload(Mirror(rank, taken.kind, taken.step))

    def _step(self, taken: Snapshot) -> int:
        """Return the number of updates. Lightning's count still lacks an update whose tail is still to come."""
        in_tail = taken.place == "tail" if taken.private.fresh else taken.kind == "tail"
        return self._trainer.global_step + (in_tail and not self._training.manual)
