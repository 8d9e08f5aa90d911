"""One fit: its steps and its recovery, which use the sharded state, the host state and the session."""

import json
import logging
import operator
import signal
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, Literal, NoReturn

import torch.distributed as dist
from torch import Tensor
from torch.optim import Optimizer

from lightning_replica._compat.lightning import Sigterm, user_optimizer
from lightning_replica._compat.lightning_names import pl
from lightning_replica.control.planned_save import PlannedSave
from lightning_replica.core.digests import Digest
from lightning_replica.core.exchange import all_gather_bytes
from lightning_replica.core.inexact import Inexact
from lightning_replica.core.messages import warn
from lightning_replica.core.pending_work import finish
from lightning_replica.core.points import at_step, reach
from lightning_replica.devices.interface import Device
from lightning_replica.errors import ConfigurationError, DeviceLostError, RecoveryError
from lightning_replica.groups.membership import Groups
from lightning_replica.recovery.diagnosis import OwnFault, own_fault
from lightning_replica.recovery.planner import Plan
from lightning_replica.sharding.engine import (
    Commit,
    EngineSettings,
    Flags,
    Request,
    make_engine,
)
from lightning_replica.state.aliases import Aliases
from lightning_replica.state.builds import differing
from lightning_replica.state.host_state import LightningHostState
from lightning_replica.state.module_buffers import BufferSync
from lightning_replica.state.reachable import Survey
from lightning_replica.state.snapshot import Snapshot
from lightning_replica.trainer import carried_gradients, lengths
from lightning_replica.trainer.ddp_differences import differences_from_ddp
from lightning_replica.trainer.hooks import Hooks
from lightning_replica.trainer.incidents import Incidents
from lightning_replica.trainer.joining import Joining
from lightning_replica.trainer.model_part import ModelPart
from lightning_replica.trainer.overrides import (
    gradient_use,
    may_change_weights,
    reader_of_states,
    shows_outputs,
)
from lightning_replica.trainer.precision import ShardedStep
from lightning_replica.trainer.records import Records
from lightning_replica.trainer.repeated import RepeatedStep
from lightning_replica.trainer.saving.last_save import LastSave
from lightning_replica.trainer.session import Session

log = logging.getLogger(__name__)

# Signals that end a run after a last checkpoint, beside SIGTERM: a terminal's, and the one that SLURM usually sends.
_ENDS = (signal.SIGINT, signal.SIGUSR1)


class Training:
    """Makes the steps of one fit, and recovers between them. See docs/life_of_a_step.md.

    Args:
        trainer: The trainer that fits.
        session: The session of this process.
        precision: The precision plugin.
        optimizers: The user's optimizers.
        settings: How the state is sharded, as far as the user chooses.
        whole_gradients: Whether every gradient is whole after backward; "auto" decides by the user's hooks.
        part: Which part of the model this rank has.
        joins: Joins ranks with different numbers of batches, if that is wanted.

    Attributes:
        recoverable: Whether the fit recovers from faults. If not, nothing is kept for recovery.
        part: See above.
        last_save: Writes the last checkpoint of a run that cannot continue.
        records: What the fit has written.
    """

    def __init__(
        self,
        trainer: pl.Trainer,
        session: Session,
        precision: ShardedStep,
        optimizers: Sequence[Optimizer],
        settings: EngineSettings,
        whole_gradients: bool | Literal["auto"],
        part: ModelPart,
        joins: Joining | None,
    ) -> None:
        module = trainer.lightning_module
        self._trainer, self._session, self._precision, self._module = trainer, session, precision, module
        self.recoverable = session.options.recovery
        self.part, self._joins = part, joins
        self.manual = not module.automatic_optimization
        survey = Survey.of(trainer)
        gradients = gradient_use(trainer, survey, whole_gradients)
        self.whole_gradients = gradients.whole
        settings = replace(
            settings,
            whole_gradients=self.whole_gradients,
            keeps_gradients=gradients.kept,
            manual=self.manual,
            shared_memory=settings.shared_memory and self.device.is_host,
            uncounted=part.uncounted,
            experts=part.experts,
            counts_zeros=part.counts_zeros,
            guard=session.options.guard,
            recoverable=self.recoverable,
        )
        self._optimizers = [user_optimizer(each) for each in optimizers]
        if trainer.is_global_zero and not session.is_replacement:
            reader = reader_of_states(trainer, survey)
            for difference in differences_from_ddp(module, self._optimizers, settings.partition, reader):
                warn(difference)
        parameters = list(module.parameters())
        grids = session.world.grids.grids_of(session.rank)
        self.inexact = inexact = Inexact()
        self._aliases = Aliases(trainer, survey, inexact.report)
        self.state = make_engine(
            grids, session.rank, parameters, optimizers, settings, self.device.fence, inexact.report
        )
        self._aliases.follow()
        self.host = LightningHostState(trainer, self.state, self.device, inexact, shows_outputs(trainer, module))
        self._repeated = RepeatedStep(self.state, session.rank, inexact.report)
        self._recovered: Plan | None = None  # by which plan, until the next commit
        self._buffers = BufferSync(module, self.host.buffers, session.world.wait)
        self._sigterm = Sigterm(trainer, _ENDS if session.options.gasp else (), session.exits.limit_time)
        self._stop_agreed = False
        self._tail_commit: Commit | None = None  # of the tail that is done again
        self.last_save = LastSave(session)
        self._planned: PlannedSave | None = None
        self._may_change_weights = may_change_weights(trainer, module)
        self._weights_touched = True  # code before the first step may have changed weights
        self._window_is_open = self._released = False
        self._hooks = Hooks(trainer, self.device)
        self._incidents = Incidents(trainer, session, self._hooks)
        self.records = Records(trainer, session, inexact.report)
        session.attach(self.state, self._hooks.phase if self._hooks.any else None)
        session.exits.end_waiting(session.world.generations, lambda: self.stop_requested)
        precision.attach(self)

    # A step, in the order of calls

    def begin_batch(self, first_of_window: bool) -> None:
        """Prepare a batch, and take the first snapshot where a window begins. Called before every batch.

        Args:
            first_of_window: Whether the step's gradients begin here. Not used under manual optimization, where
                `end_manual_batch` finds it out.
        """
        at_step(self.state.step)
        self._session.world.check()
        goes_on = self._window_is_open if self.manual else not first_of_window
        self._incidents.batch(first_of_window=not goes_on)
        if goes_on:
            return
        self._check_optimizers()
        self._incidents.publish(self.state.step)
        finish(self.check)  # of the gather: what follows needs its result, and would wait for it without any check
        self.give_buffers()
        self.state.begin_window(self._may_change_weights or self._weights_touched)
        self._weights_touched = False
        self._repeated.begin()
        if not self.recoverable:
            self.host.pass_window(self.state.step)
            return
        taken = self.host.begin_window(self.state.step, whole=self._stop_agreed)
        self.records.taken("batch", taken.step)
        self._session.mirrors.begin("batch", taken.step, taken.private.pack())
        if self._stop_agreed:
            self._session.mirrors.settle()
            self._session.world.generations.give_up("All ranks have agreed to save and end.", asked=True)
            self._end_with_last_save()
        if self._planned is not None and self._planned.is_due:
            self._session.mirrors.settle()
            self._planned.write()

    def _check_optimizers(self) -> None:
        """Raise an error if code has given the trainer other optimizers, which nothing has sharded.

        Raises:
            ConfigurationError: If it has.
        """
        now = [user_optimizer(each) for each in self._trainer.optimizers]
        if not all(map(operator.is_, now, self._optimizers)) or len(now) != len(self._optimizers):
            problem = (
                f"Code has given the trainer other optimizers in training: {', '.join(map(_name_of, now)) or 'none'},"
                f" in place of {', '.join(map(_name_of, self._optimizers))}. `replica_zero` shards those that"
                " `configure_optimizers` returns. Change their param groups (`add_param_group`, `requires_grad`), or"
                " begin another fit."
            )
            self._session.world.generations.give_up(problem)
            raise ConfigurationError(problem)

    def give_buffers(self) -> None:
        """Give the first rank's buffers to all ranks if that is due, before a window or a validation. Collective.

        Any code may have written to them since the commit: hooks, schedulers, loggers, a validation.
        """
        # Under `StochasticWeightAveraging`, an epoch without commits collects BatchNorm's statistics.
        self.share_buffers(then_give=self._trainer.training and self._trainer.fit_loop._skip_backward)
        self._buffers.give()

    def share_buffers(self, then_give: bool = False) -> None:
        """Make the first rank's buffers the shared ones. Collective.

        Args:
            then_give: Whether the next forward pass begins with them.
        """
        self._buffers.share(self.groups.members, 0 if self._joins is None else self._joins.source, then_give)
        finish(self.check)

    @property
    def first_rank(self) -> int:
        """The rank whose buffers all ranks share that have the same part of the model."""
        return self._session.world.grids.grids_of(self._session.rank)[0].ranks[0]

    def shared_buffers(self) -> dict[int, Tensor]:
        """Return copies of the shared buffers, by the ``id`` of the module's."""
        return self._buffers.shared()

    def before_backward(self, accumulating: bool, loss: Tensor | None = None) -> None:
        """Prepare reductions that overlap the backward pass."""
        if loss is not None and self.recoverable:
            self._repeated.add(loss)
        self.state.before_backward(reduce=not accumulating)

    def after_backward(self, accumulating: bool) -> None:
        """Complete a backward pass, before the hooks that follow it."""
        self.state.after_backward(reduce=not accumulating)

    def unscale(self, optimizer: Optimizer, scale: float) -> None:
        """Divide the whole gradient of an optimizer by the loss scale."""
        self.state.unscale(user_optimizer(optimizer), scale)

    def clip(self, optimizer: Optimizer, limit: float) -> None:
        """Clip the whole gradient of an optimizer by its norm."""
        self.state.clip(user_optimizer(optimizer), limit)

    def step(self, optimizer: Optimizer, request: Request) -> None:
        """Make the update of one optimizer. Called after backward and its hooks."""
        if self.manual:
            self._precision.after_commit(self.state.step_one(user_optimizer(optimizer), request))
        else:
            self.state.adopt_written(self._may_change_weights)
            self.state.reduce()
            self._commit(request, self.host.closure_output())
            self.state.gather()
            self._step_is_done()

    def end_manual_batch(self, output: dict[str, Any]) -> None:
        """Commit a training step that has made its own optimizer steps, unless gradients wait for a later batch."""
        self._window_is_open = self.state.window_is_open
        if not self._window_is_open:
            self.state.end_batch()
            self._commit(Request(), output)
            self._step_is_done()

    def return_to_commit(self, tail: Snapshot) -> None:
        """Undo what user code has done so far in a tail that is done again; the update itself is made. Collective."""
        self.host.return_to(tail)
        self.state.return_to_update()
        if self._tail_commit is not None and not self.manual:
            self._precision.after_commit(self._tail_commit)

    def _step_is_done(self) -> None:
        self._incidents.good_step()
        reach("batch_end")

    def _commit(self, request: Request, output: dict[str, Any]) -> None:
        state, session = self.state, self._session
        self.share_buffers(then_give=not self.manual)  # under DDPStrategy, manual optimization leaves ranks their own
        if self._joins is not None:
            self._buffers.give()  # under DDP, ranks that have joined get them
        if self.recoverable:
            taken = self.host.enter_commit(state.step + 1, output)
            self.records.taken("tail", taken.step)
            found = state.digest()
            session.mirrors.begin("tail", taken.step, taken.private.pack(), found)
        else:
            self.host.pass_commit(state.step + 1, output)
        flags = Flags(self._sigterm.noted, self.save_requested, lengths.is_last(self._trainer))
        part = state.part_of_commit(request, flags)  # the mirrors are under way meanwhile
        if self.recoverable:
            session.mirrors.settle()
            if found is not None:
                state.compare({**session.mirrors.digests(taken.step), session.rank: found})
        if self._recovered is not None:
            self._check_exactness(self._recovered)
        reach("before_commit")
        commit = state.commit(part)
        session.recovery.committed(state.step + 1, commit.vector)
        reach("after_commit")
        if 0 < commit.last < session.world.size:
            problem = lengths.ends(self._trainer, self.groups.world, self.check)
            session.world.generations.give_up(problem)
            raise ConfigurationError(problem)
        state.update()
        self._after_commit(commit)

    def _check_exactness(self, plan: Plan) -> None:
        """Report what is not exact since the recovery by ``plan``.

        Raises:
            RecoveryError: If the user wants the run to end then.
        """
        self._recovered = None
        self._repeated.compare()
        found = self.inexact.after(replaced=any(move.host for move in plan.moves))
        self._incidents.inexact(found)
        if found and self._session.options.on_inexact == "raise":
            named = "; ".join(f"{name}: {why}" for name, why in found.items())
            final = RecoveryError(f'The recovery at step {plan.step} is not exact (`on_inexact="raise"`): {named}.')
            self._session.world.generations.forbid_saving()
            self._give_up(final)
            raise final

    def _after_commit(self, commit: Commit) -> None:
        """Do what follows from the commit alone. It is done again in a tail that is done again."""
        if not self.manual:
            self._precision.after_commit(commit)
        if self._planned is not None:
            self._planned.agree(commit.save)
        if commit.stop and self._session.options.gasp:
            self._stop_agreed = True  # `begin_batch` saves and ends
        elif commit.stop:
            self._session.handoff.training_is_done()
            self._sigterm.agree()

    # Recovery, called by the fit loop

    def begin(self, loaded: Snapshot | None) -> Snapshot | None:
        """Begin training, right before the first batch. A replacement joins the other ranks here.

        Args:
            loaded: Where training resumes by the checkpoint; None if none was loaded.

        Returns:
            Where training actually begins.
        """
        self.host.begin_to_save()
        if self._session.is_replacement:
            self._session.handoff.join_loop()
            self.host.set_differing(self._session.handoff.read_note(self._note_of_builds) or {})
            self._incidents.started_as_replacement()
            return self._recover(None)
        if loaded is not None:
            self.host.load(loaded)
            carried_gradients.put(self._module, self.state, loaded, self.inexact.report)
            point = loaded.replicated.point
            if point is not None and point.agreed:
                self._tail_commit = replace(Commit.of(point.agreed), stop=0.0, save=0.0)
                self._after_commit(self._tail_commit)
        taken = self.host.begin(loaded)
        if self.recoverable:
            self._session.mirrors.begin("tail", taken.step, taken.private.pack())
            self._session.mirrors.settle()
            self._compare_builds(self.host.signature(taken))
        self._session.arm()
        return taken

    def _compare_builds(self, own: dict[str, str]) -> None:
        """Leave to a replacement in what the objects here differ from those of the peers. Collective."""
        received = all_gather_bytes(json.dumps(own).encode(), self.groups.peers, self.check)
        found = differing(own, map(json.loads, received))
        self.host.set_differing(found)
        if found:
            self._session.handoff.leave_note(self._note_of_builds, found)

    @property
    def _note_of_builds(self) -> str:
        return f"builds/{self._session.fits}"

    def pass_loop(self) -> bool:
        """Skip a training loop on a replacement that joins in a later one, and take over the loop's result.

        Returns:
            Whether the loop is skipped, so that there is nothing to train here.
        """
        result = self._session.handoff.pass_loop(self._module)
        if result is not None:
            self.host.adopt_result(*result)
        return result is not None

    def end(self) -> None:
        """End the fit. From here on no rank needs to go back.

        Raises:
            CorruptedShardError: If this rank's shard is wrong. Peers compare here because no commit follows.
        """
        found = self.state.digest()
        if found is not None:
            received = all_gather_bytes(json.dumps(found.plain).encode(), self.groups.peers, self.check)
            peers = zip(self.groups.grid.peers(self._session.rank), received, strict=True)
            self.state.compare({peer: Digest.of(json.loads(plain)) for peer, plain in peers})
        self._session.disarm(self._module, self.host.result)

    def report(self) -> None:
        """Report an incident that no further step has followed. Called after the end."""
        self._incidents.publish(None)

    def recover_from(self, error: Exception) -> Snapshot | None:
        """Recover from a fault that surfaced as ``error``, and return where training continues.

        Raises:
            RecoveryError: If the run cannot continue. If ``error`` is this rank's own, it is raised instead.
        """
        self._incidents.fault(self.state.step)
        own = own_fault(error, self.device)
        if self.state.corrupted:
            log.warning("%s", self.state.corrupted)
            own = None if own is not None and own.is_exception else own
        if own is not None and own.is_exception:
            self._incidents.show(own.text, error)
        elif own is not None:
            log.warning("rank %d: %s", self._session.rank, own.text)
        error.__traceback__ = None  # its frames hold process groups and half a step's activations
        if own is not None and own.loses_device:
            self._session.exits.without_device(own.text)
        try:
            return self._recover(own)
        except RecoveryError as final:
            if own is not None and own.is_exception:
                raise error from final
            raise

    def _recover(self, own: OwnFault | None) -> Snapshot | None:
        session = self._session
        self._repeated.interrupted()
        generations, before = session.world.generations, session.world.generations.current
        try:
            outcome = session.recovery.recover(self.state, self.host, session.is_replacement, own)
        except DeviceLostError as lost:
            session.exits.without_device(str(lost))
        except dist.DistNetworkError:  # the store is gone; the monitor's thread will see it too, but later
            session.exits.as_orphan()
            raise
        except RecoveryError as final:
            self._give_up(final)
            raise
        self.records.restored(outcome.plan.kind, outcome.plan.step)
        self._recovered = outcome.plan
        if any(map(generations.has_corruption, range(before + 1, outcome.generation + 1))):
            self._repeated.forget()  # it may have been computed from wrong bits
        if session.is_replacement:
            session.handoff.has_joined()
        self._window_is_open, self._weights_touched = False, True
        self._buffers.forget()
        if self._planned is not None:
            self._planned.withdraw()
        self._tail_commit = None
        if outcome.plan.kind == "tail" and outcome.plan.commit:
            self._tail_commit = Commit.of(outcome.plan.commit, self.part.counts_zeros)
            self._after_commit(self._tail_commit)
        self._incidents.went_on(outcome)
        return self.host.resume

    def _give_up(self, final: RecoveryError) -> None:
        """End the run, for all ranks."""
        session = self._session
        session.ending.leave_step(session.rank, self._trainer.global_step)  # `state.step` counts this run's steps
        session.world.generations.give_up(str(final), asked=self.stop_requested)
        step = session.recovery.planned_step if session.is_replacement else self.state.step
        self._incidents.failed(str(final), step)
        if session.options.gasp:
            self._end_with_last_save()
        session.world.let_go()

    def _end_with_last_save(self) -> NoReturn:
        self._released = True  # copying parameters out of their buffers would use up the grace period
        self.last_save.end(self.state, self.host)

    def weights_may_differ(self) -> None:
        """Note that user code may have written to the weights outside of a step's own hooks."""
        self._weights_touched = True

    def save_on_request(self, write: Callable[[], None]) -> None:
        """Let users ask for a checkpoint. Of several calls, which may save to different places, the first counts.

        Args:
            write: Writes the checkpoint. Collective.
        """
        if self._planned is None and self.recoverable:
            self._planned = PlannedSave(write)
            self._session.handoff.accept_save_requests()

    def release(self) -> None:
        """Release the sharded state, the loggers and the callbacks: the trainer is done with this fit."""
        self.records.release()
        if not self._released:
            self._released = True
            self.state.release()
            self._aliases.follow()

    @property
    def save_requested(self) -> bool:
        """Whether this rank was asked for a checkpoint that is not written yet."""
        return self._planned is not None and self._planned.noted

    @property
    def stop_requested(self) -> bool:
        """Whether this process got a signal to end; ``trainer.received_sigterm`` is true only once all ranks agree."""
        return self._sigterm.noted

    def check(self) -> None:
        """Raise `Interrupted` if this rank's generation is known to be over. Called while a collective waits."""
        self._session.world.check_now()

    @property
    def device(self) -> Device:
        """The device that this rank trains on."""
        return self._session.world.device

    @property
    def groups(self) -> Groups:
        """The process groups of this generation."""
        return self._session.world.groups


def _name_of(value: object) -> str:
    return type(value).__name__
