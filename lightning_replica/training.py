"""One fit: the sharded state, the host state and this process's part in the world, working together."""

import json
import logging
import signal
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, Literal, NoReturn

import lightning.pytorch as pl
import torch.distributed as dist
from torch.optim import Optimizer

from lightning_replica._compat.lightning import Sigterm
from lightning_replica.checkpoint_files import CheckpointFiles
from lightning_replica.data.deaths import worker_died
from lightning_replica.devices.interface import Device
from lightning_replica.digests import Digest
from lightning_replica.errors import CheckpointError, DeviceLostError, RecoveryError, ReplicaError
from lightning_replica.exit_codes import GASP_WRITTEN, NOTHING_SAVED
from lightning_replica.hooks import Hooks, explain, fault_behind
from lightning_replica.host import LightningHost
from lightning_replica.incidents import Incidents
from lightning_replica.launch.rank import enter
from lightning_replica.logger_rows import LoggerRows
from lightning_replica.module_buffers import BufferSync
from lightning_replica.overrides import may_change_weights, who_sees_gradients
from lightning_replica.planned_save import PlannedSave
from lightning_replica.points import at_step, reach
from lightning_replica.precision import ShardedStep
from lightning_replica.recovery.faults import Detected
from lightning_replica.recovery.gasp import GaspPlan
from lightning_replica.recovery.interface import Kind
from lightning_replica.session import Session
from lightning_replica.sharding.collectives import Groups, all_gather_bytes
from lightning_replica.sharding.commit import Commit, Request
from lightning_replica.sharding.layout import Partition
from lightning_replica.sharding.optimizer import ShardedOptimizer
from lightning_replica.sharding.state import ShardedState
from lightning_replica.snapshot import Snapshot
from lightning_replica.works import finish

log = logging.getLogger(__name__)

# What ends a run that saves first, beside SIGTERM: a terminal's, and what SLURM is mostly told to send.
_ENDS = (signal.SIGINT, signal.SIGUSR1)


class Training:
    """Makes the steps of one fit, and recovers between them. See docs/life_of_a_step.md.

    Args:
        trainer: The trainer that fits.
        session: This process's part in the world.
        precision: The precision plugin.
        optimizers: The user's optimizers.
        bucket_bytes: Size at which a gradient bucket is closed.
        partition: How buckets are cut.
        whole_gradients: Whether every gradient shall be whole after backward; "auto" asks the user's hooks.
        shared_memory: Whether ranks of one machine read each other's memory instead of sending.

    Attributes:
        write_last: Writes the last checkpoint of a run that cannot go on; set by `DyingGaspCheckpoint`.
        planned: A checkpoint that someone may ask for; None where nobody has said where it would go.
        recoverable: Whether a fault is recovered from; without it, nothing is kept for that.
    """

    def __init__(
        self,
        trainer: pl.Trainer,
        session: Session,
        precision: ShardedStep,
        optimizers: Sequence[Optimizer],
        bucket_bytes: int,
        partition: Partition,
        whole_gradients: bool | Literal["auto"],
        shared_memory: bool = True,
    ) -> None:
        module = trainer.lightning_module
        self._trainer, self._session, self._precision, self._module = trainer, session, precision, module
        self.recoverable = session.options.recovery
        self.manual = not module.automatic_optimization
        self.whole_gradients = _resolve(whole_gradients, trainer)
        self.state = ShardedState(
            session.grid,
            session.rank,
            list(module.parameters()),
            optimizers,
            bucket_bytes,
            partition,
            self.whole_gradients,
            self.manual,
            shared_memory and self.device.is_host,
            session.options.guard,
            self.recoverable,
            self.device.fence,
        )
        self.host = LightningHost(trainer, self.state, self.device)
        self._module_buffers = BufferSync(module, session.wait)
        self._sigterm = Sigterm(trainer, _ENDS if session.options.gasp else (), session.told_to_end)
        self._told_to_end = False
        self.write_last: Callable[[GaspPlan], str] | None = None
        self.planned: PlannedSave | None = None
        self._may_change_weights = may_change_weights(trainer, module)
        self.weights_touched = True  # what came before the first step may have changed weights
        self._accumulating = self._window_is_open = self._released = False
        self._hooks = Hooks(trainer, self.device)
        self._incidents = Incidents(trainer, session, self._hooks)
        self._shown = ""  # the newest exception whose traceback has been printed
        writes = self.recoverable and trainer.is_global_zero
        store = session.generations.store
        rows = [LoggerRows(store, trainer.loggers, session.newborn)] if writes else []
        saving = trainer.checkpoint_callbacks if self.recoverable else ()
        self.files = CheckpointFiles(store, saving, session.newborn, writes)
        self._written: list[CheckpointFiles | LoggerRows] = [self.files, *rows]
        session.attach(self.state, self._hooks.phase if self._hooks.any else None)
        session.end_when_told(lambda: self.asked_to_stop)
        precision.attach(self)

    # A step, in the order of calls

    def begin_batch(self, first_of_window: bool) -> None:
        """Before every batch; takes the first snapshot where a window begins.

        Args:
            first_of_window: Whether the step's gradients begin here; under manual optimization, we know better.
        """
        at_step(self.state.step)
        self._session.check()
        goes_on = self._window_is_open if self.manual else not first_of_window
        self._incidents.batch(first_of_window=not goes_on)
        if goes_on:
            return
        self._incidents.tell(self.state.step)
        finish(self.check)  # of the gather: what comes needs the device to have done it, and waits without a look
        self.state.begin_window(self._may_change_weights or self.weights_touched)
        self.weights_touched = False
        if not self.recoverable:
            self.host.pass_window(self.state.step)
            return
        taken = self.host.begin_window(self.state.step)
        self._snapshot_taken("batch", taken.step)
        self._session.mirrors.begin("batch", taken.step, taken.private_bytes())
        if self._told_to_end:
            self._session.mirrors.settle()
            self._session.generations.give_up("All ranks have agreed to save and end.", asked=True)
            self._end_with_gasp()
        if self.planned is not None and self.planned.agreed:
            self._session.mirrors.settle()
            self.planned.write()

    def _snapshot_taken(self, kind: Kind, step: int) -> None:
        for each in self._written:
            each.taken(kind, step)

    def before_backward(self, accumulating: bool) -> None:
        """Makes ready for reductions that overlap backward."""
        self._accumulating = accumulating
        self.state.before_backward(reduce=not accumulating)

    def after_backward(self) -> None:
        """Before the hooks that follow a backward pass."""
        self.state.after_backward(reduce=not self._accumulating)

    def unscale(self, optimizer: Optimizer, scale: float) -> None:
        """Divides the whole gradient of an optimizer by the loss scale."""
        for buffers in self.sharded(optimizer).buffers:
            buffers.grads.mul_(1.0 / scale)

    def clip(self, optimizer: Optimizer, limit: float) -> None:
        """Clips the whole gradient of an optimizer by its norm."""
        sharded = self.sharded(optimizer)
        self.state.attach_gradients([sharded])
        self.state.clip_whole(sharded, limit)

    def step(self, optimizer: Optimizer, request: Request) -> None:
        """After backward and its hooks: the update of one optimizer."""
        self.state.request = request
        if self.manual:
            sharded = self.sharded(optimizer)
            self.state.reduce([sharded])
            self._precision.after_commit(self.state.step_one(sharded))
        else:
            self.state.reduce()
            self._commit(self.host.closure_output())
            self.state.gather()
            self._step_is_done()

    def end_manual_batch(self, output: dict[str, Any]) -> None:
        """The end of a training step that has stepped by itself: now it counts."""
        self._window_is_open = self.state.window_is_open
        if not self._window_is_open:
            self.state.end_batch()
            self._commit(output)
            self._step_is_done()

    def _step_is_done(self) -> None:
        self._incidents.good_step()
        self._shown = ""
        reach("batch_end")

    def _commit(self, output: dict[str, Any]) -> None:
        state, session = self.state, self._session
        self._module_buffers.sync(session.groups.world)
        finish(self.check)
        if self.recoverable:
            taken = self.host.enter_commit(state.step + 1, output)
            self._snapshot_taken("tail", taken.step)
            found = state.look()
            session.mirrors.begin("tail", taken.step, taken.private_bytes(), found)
        else:
            self.host.pass_commit(state.step + 1, output)
        save = self.planned is not None and self.planned.noted
        part = state.part_of_commit(self._sigterm.noted, save)  # meanwhile the mirror is under way
        if self.recoverable:
            session.mirrors.settle()
            if found is not None:
                state.hear({**session.mirrors.digests(taken.step), session.rank: found})
        reach("before_commit")
        commit = state.commit(part)
        session.recovery.committed(state.step + 1, commit.vector)
        reach("after_commit")
        state.update()
        self._after_commit(commit)

    def _after_commit(self, commit: Commit) -> None:
        """What follows from the commit alone; in a tail that is done again, it is done again too."""
        if not self.manual:
            self._precision.after_commit(commit)
        if self.planned is not None:
            self.planned.agreed = commit.save > 0
        if commit.stop and self._session.options.gasp:
            self._told_to_end = True  # at the start of the next batch
        elif commit.stop:
            self._session.leave()
            self._sigterm.agree()

    # Recovery, called by the fit loop

    def begin(self, loaded: Snapshot | None) -> Snapshot | None:
        """The last thing before the first batch. On a replacement: joins the others.

        Args:
            loaded: Where a checkpoint says that training goes on.

        Returns:
            Where it goes on indeed.
        """
        if self._session.newborn:
            self._session.succession.join_loop()
            self._incidents.born()
            return self._recover("")
        if loaded is not None:
            self.host.load(loaded)
            if loaded.replicated.get("commit"):
                self._after_commit(replace(Commit.of(loaded.replicated["commit"]), stop=0.0, save=0.0))
        taken = self.host.begin(loaded)
        if self.recoverable:
            self._session.mirrors.begin("tail", taken.step, taken.private_bytes())
            self._session.mirrors.settle()
        self._session.arm()
        return taken

    def pass_loop(self) -> bool:
        """On a replacement that is wanted in a later training loop: takes what this one came to.

        Returns:
            Whether that is so, and there is nothing to train here.
        """
        result = self._session.succession.pass_loop(self._module)
        if result is not None:
            self.host.adopt_result(*result)
        return result is not None

    def end(self) -> None:
        """The last thing in a fit: from here on nobody needs to go back.

        Raises:
            CorruptedShardError: If this rank's shard is wrong: no commit follows in which peers would compare.
        """
        found = self.state.look()
        if found is not None:
            told = all_gather_bytes(json.dumps(found.plain).encode(), self.groups.peers, self.check)
            peers = zip(self.groups.grid.peers(self._session.rank), told, strict=True)
            self.state.hear({peer: Digest.of(json.loads(plain)) for peer, plain in peers})
        self._session.disarm(self._module, self.host.result)

    def report(self) -> None:
        """After the end: tells of an incident that no further step has followed."""
        self._incidents.tell(None)

    def recover_from(self, error: Exception) -> Snapshot | None:
        """Recovers from a fault that surfaced as ``error``; returns where training goes on.

        Raises:
            RecoveryError: If the run cannot go on; ``error`` itself where it was this rank's own.
        """
        self._incidents.fault(self.state.step)
        fault = fault_behind(error, self.device)
        raised = explain(error) if fault is None else ""
        device_said = "" if fault is None or fault.level == "outside" else fault.text
        if self.state.corrupted:
            log.warning("%s", self.state.corrupted)
            raised = ""
        if device_said:
            log.warning("rank %d: %s", self._session.rank, device_said)
        if raised:
            self._show(raised, error)
        error.__traceback__ = None  # its frames hold process groups and half a step's activations
        if fault is not None and fault.level == "lost":
            self._session.leave_without_device(device_said)
        try:
            return self._recover(raised, device_said, "worker death" if worker_died(error) else "device error")
        except RecoveryError as final:
            if raised:
                raise error from final
            raise

    def _show(self, raised: str, error: Exception) -> None:
        """Shows the traceback, first and once, whichever rank meets the error, and however often."""
        rank = enter()
        if rank is not None:
            rank.show(error)
            return
        log.warning("rank %d: %s", self._session.rank, raised, exc_info=None if raised == self._shown else error)
        self._shown = raised

    def _recover(self, raised: str, device_said: str = "", because: Detected = "device error") -> Snapshot | None:
        session = self._session
        try:
            outcome = session.recovery.recover(self.state, self.host, session.newborn, raised, device_said, because)
        except DeviceLostError as lost:
            session.leave_without_device(str(lost))
        except dist.DistNetworkError:  # the store is gone; the monitor's thread will see it too, but later
            session.end_as_orphan()
            raise
        except RecoveryError as final:
            session.ending.leave_step(session.rank, self._trainer.global_step)  # ours counts from where this run began
            session.generations.give_up(str(final), asked=self.asked_to_stop)
            step = session.recovery.planned_step if session.newborn else self.state.step
            self._incidents.failed(str(final), step)
            if session.options.gasp:
                self._end_with_gasp()
            session.let_go()
            raise
        for each in self._written:
            each.restored(outcome.plan.kind, outcome.plan.step)
        if session.newborn:
            session.has_joined()
        self._window_is_open, self.weights_touched = False, True
        self._module_buffers.forget()
        if self.planned is not None:
            self.planned.agreed = False  # a replacement would not know; who was asked says so again
        if outcome.plan.kind == "tail" and outcome.plan.commit:
            self._after_commit(Commit.of(outcome.plan.commit))
        self._incidents.went_on(outcome)
        return self.host.resume

    def _end_with_gasp(self) -> NoReturn:
        """Writes the last checkpoint with all who are left, and ends this process.

        Raises:
            SystemExit: With a code of `exit_codes`.
        """
        session = self._session
        self._released = True  # the process ends: copying parameters out of their buffers would take from its grace
        if self.write_last is None:
            raise ReplicaError("Nobody has said where the last checkpoint goes.")
        try:
            path = session.gasp().run(
                self.state, self.host, lambda: session.recovery.report(self.state, self.host), self.write_last
            )
        except DeviceLostError as lost:
            session.leave_without_device(str(lost))
        except (RecoveryError, CheckpointError) as error:
            log.error("rank %d: the last checkpoint could not be written: %s", session.rank, error)
            raise SystemExit(NOTHING_SAVED) from error
        log.info("rank %d: the last checkpoint is %s", session.rank, path)
        raise SystemExit(session.ending.code(GASP_WRITTEN))

    def release(self) -> None:
        """The trainer is done with this fit."""
        for each in self._written:
            each.release()
        if not self._released:
            self._released = True
            self.state.release()

    @property
    def asked_to_stop(self) -> bool:
        """Whether this process has got a SIGTERM; ``trainer.received_sigterm`` is true once all ranks know."""
        return self._sigterm.noted

    def check(self) -> None:
        """Raises `Interrupted` if the world has moved on; for collectives to call while they wait."""
        self._session.look()

    @property
    def device(self) -> Device:
        """What this rank trains on."""
        return self._session.device

    @property
    def groups(self) -> Groups:
        """The process groups of this generation."""
        return self._session.groups

    def sharded(self, optimizer: Optimizer) -> ShardedOptimizer:
        """What has sharded an optimizer of the user's."""
        inner = getattr(optimizer, "_optimizer", optimizer)  # Lightning's wrapper
        return next(sharded for sharded in self.state.optimizers if sharded.optimizer is inner)


def _resolve(whole_gradients: bool | Literal["auto"], trainer: pl.Trainer) -> bool:
    """Manual optimization shows gradients to the user's own code; hooks in between do likewise."""
    module = trainer.lightning_module
    if whole_gradients != "auto":
        return whole_gradients
    if not module.automatic_optimization:
        return True
    hook = who_sees_gradients(trainer, module)
    if hook is not None and trainer.is_global_zero:
        log.info("`%s` may look at gradients, so they are gathered on every rank (whole_gradients='auto').", hook)
    return hook is not None
