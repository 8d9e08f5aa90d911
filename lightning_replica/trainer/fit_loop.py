"""Lightning's loops, which can also begin in the middle.

`ReplicaFitLoop.run` catches the exception of a fault, has the fit recover, and continues from the snapshot that the
ranks agreed on: at the start of a batch window, or in the tail of a step. In the same way a fit resumes from a
checkpoint, at the place where the checkpoint was written (saving/resume.py). The control flow is Lightning's own. Where
this file follows it line by line (`_epochs`, `_end_epoch`, `ReplicaEpochLoop.run`, `_tail`),
tests/compat/test_compat.py watches the original.

A rank without inputs shadows the steps of the others (joining.py): of what the loop does with a batch, it does what is
not about the batch.
"""

from collections import OrderedDict
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from functools import partial
from typing import Any, Final, Protocol, cast

import torch

from lightning_replica._compat.lightning import walk_loops
from lightning_replica._compat.lightning_names import (
    Checkpoint,
    Closure,
    ClosureResult,
    LearningRateMonitor,
    ProgressBar,
    Timer,
    WeightAveraging,
    _AutomaticOptimization,
    _call_callback_hooks,
    _call_lightning_module_hook,
    _EvaluationLoop,
    _FitLoop,
    _ManualOptimization,
    _TrainingEpochLoop,
    _TunerExitException,
    isolate_rng,
    pl,
)
from lightning_replica.core.inexact import Report
from lightning_replica.core.points import begin, reach
from lightning_replica.errors import ConfigurationError, ProtocolError, RecoveryError
from lightning_replica.state.data import deaths
from lightning_replica.state.data.in_loops import exact_loaders, put_in, take_out, training_loaders, validation_loaders
from lightning_replica.state.data.inputs import Shadow
from lightning_replica.state.data_setup import RemembersSetup
from lightning_replica.state.reachable import training_objects
from lightning_replica.state.snapshot import Snapshot
from lightning_replica.trainer.hooks import named_hooks
from lightning_replica.trainer.joining import Joining
from lightning_replica.trainer.lengths import check, lengths_of
from lightning_replica.trainer.session import Session
from lightning_replica.trainer.steps import Training

# These are not faults: Lightning uses the first for control flow, and the others say that the run cannot recover.
_PASS: Final = (_TunerExitException, RecoveryError, ProtocolError, ConfigurationError)
# Callbacks that act on steps and use no batch. They meet other ranks, or must be the same on all.
_ACT_ON_STEPS: Final = (Checkpoint, LearningRateMonitor, ProgressBar, Timer, WeightAveraging)


class FitStrategy(Protocol):
    """What the loops use of the strategy."""

    _lightning_optimizers: list[Any]

    @property
    def joining(self) -> Joining | None:
        """Joins ranks with different numbers of batches, if the user wants that."""

    @property
    def training(self) -> Training:
        """The fit under way."""

    @property
    def session(self) -> Session:
        """The session of this process."""

    @property
    def report_inexact(self) -> Report:
        """Called with what is not restored exactly."""

    def resumption(self, trainer: pl.Trainer) -> Snapshot | None:
        """Return where the fit resumes; None if no checkpoint has been loaded."""

    def step_is_done(self, tail: Snapshot) -> AbstractContextManager[None]:
        """Make optimizer steps inside of the block call hooks only: the update has been made."""


def adopt(trainer: pl.Trainer, strategy: FitStrategy) -> None:
    """Give the trainer's loops the classes of this module, and the strategy. The loops keep their state.

    Raises:
        ConfigurationError: If the trainer has loops that are not Lightning's.
    """
    fit_loop = trainer.fit_loop
    swaps = (
        (fit_loop, _FitLoop, ReplicaFitLoop),
        (fit_loop.epoch_loop, _TrainingEpochLoop, ReplicaEpochLoop),
        (fit_loop.epoch_loop.val_loop, _EvaluationLoop, ReplicaValidationLoop),
        (fit_loop.epoch_loop.automatic_optimization, _AutomaticOptimization, ReplicaOptimization),
        (fit_loop.epoch_loop.manual_optimization, _ManualOptimization, ReplicaManualOptimization),
    )
    for loop, original, ours in swaps:
        if type(loop) not in (original, ours):
            raise ConfigurationError(
                f"`replica_zero` recovers inside Lightning's own training loop, but this Trainer has a"
                f" {type(loop).__name__}. Leave `trainer.fit_loop` as Lightning made it."
            )
        loop.__class__ = ours
        if isinstance(loop, _HasStrategy):
            loop.strategy = strategy
    deaths.hold()


class _HasStrategy:
    """A loop to which `adopt` has given the strategy."""

    strategy: FitStrategy


class ReplicaValidationLoop(_HasStrategy, RemembersSetup, _EvaluationLoop):
    """The `_EvaluationLoop` inside of a fit.

    Its data can be put back, and its persistent workers continue from one validation to the next.
    """

    def setup_data(self) -> None:
        """Set up loaders, and put exact loaders in place of new ones."""
        before = self._combined_loader
        super().setup_data()
        if self._combined_loader is not before:
            former = exact_loaders(before)
            take_out(before)
            training = training_objects(self.trainer)
            put_in(self._combined_loader, False, None, self.strategy.report_inexact, former, training)

    def on_run_start(self) -> None:
        """Begin a validation."""
        if not self.trainer.sanity_checking:
            self.strategy.training.give_buffers()
        super().on_run_start()

    def set_up(self) -> None:
        """Make loaders during training."""
        self.trainer.validating = True
        self.setup_data()
        self.trainer.training = True

    def teardown(self) -> None:
        """Shut down all data workers."""
        take_out(self._combined_loader)
        super().teardown()


class ReplicaFitLoop(_HasStrategy, RemembersSetup, _FitLoop):
    """`_FitLoop` that recovers from faults.

    Attributes:
        lengths: Number of batches of each rank in the epoch, if ranks join; empty if some data has no length.
    """

    lengths: Sequence[int] = ()

    @property
    def _training(self) -> Training:
        return self.strategy.training

    def run(self) -> None:
        """Train to the end, through any number of faults."""
        self._follow_sanity_check()
        self.setup_data()
        loaded = self.strategy.resumption(self.trainer)
        if self.strategy.session.handoff.remembered("skips", lambda: self._skips(loaded)):
            return
        self.reset()
        self.on_run_start()
        if self._training.pass_loop():
            return
        resume = self._training.begin(loaded)
        for loader in (*training_loaders(self.trainer), *validation_loaders(self.trainer)):
            loader.leave_deaths_to_recovery()
        self._run(resume)
        self._training.report()

    def _run(self, resume: Snapshot | None) -> None:
        training = self._training
        while True:
            try:
                self._epochs(resume)
                self._restarting = False
                begin("fit_end")
                self.on_run_end()
                training.end()
                return
            except _PASS:
                raise
            except Exception as error:
                if not training.recoverable:
                    raise
                fault = error
            # Not in the clause above: an exception that is raised there would keep the fault's traceback alive.
            resume = training.recover_from(fault)

    def _load_combined_loader_states(self) -> None:
        """Put exact loaders in. `setup_data` calls this when its loaders are complete, right before they are iterated.

        States of stateful loaders in another strategy's checkpoint are not needed: the number of batches is known.
        """
        self._combined_loader_states_to_load = []
        fetcher = self._data_fetcher
        former = [] if fetcher is None else exact_loaders(fetcher._combined_loader)
        if fetcher is not None and fetcher._combined_loader is not self._combined_loader:
            for loader in former:  # no workers beside the new ones; a rank that is called back starts them again
                loader.close()
        joining = self.strategy.joining
        inputs = None if joining is None else joining.inputs()
        training = training_objects(self.trainer)
        put_in(self._combined_loader, True, inputs, self.strategy.report_inexact, former, training)
        if joining is None:
            check(lengths_of(self.trainer))
        else:
            joining.agree()

    def setup_data(self) -> None:
        """Make loaders, unless there are some and no new ones are due."""
        before = self._combined_loader
        super().setup_data()
        if self._combined_loader is not before:  # a rank that was called back would have gone on with these
            take_out(before)
        if self.strategy.joining is not None:
            self.strategy.joining.check_fetcher(self._data_fetcher)

    def _skips(self, loaded: Snapshot | None) -> bool:
        """Return whether there is nothing to train. An epoch that has not reached its end is completed first.

        A replacement uses its predecessor's answer: the checkpoint that the fit was given may have been overwritten.
        """
        return bool(self.skip) and (loaded is None or loaded.place in (None, "epoch_end"))

    def reset(self) -> None:
        """Reset the counters, unless a checkpoint held them: those say exactly where training stood."""
        restarted, self._loaded_from_state_dict = self._loaded_from_state_dict, False
        for _, loop in walk_loops(self):
            loop._restarting = False
        if not restarted:
            super().reset()
        torch.set_grad_enabled(True)

    def _follow_sanity_check(self) -> None:
        """Set validation data up before training data in a replacement whose predecessor did so for its sanity check.

        A replacement runs no sanity check. A dataset may draw its contents when it is made, so the order matters. The
        generators that the sanity check draws from are put back after it, and they are put back here too.
        """
        handoff = self.strategy.session.handoff
        if handoff.remembered("validation data", lambda: self._validates_already):
            with isolate_rng(), handoff.journal.reading_left_out():
                self._set_up_validation()

    @property
    def _validates_already(self) -> bool:
        return self.epoch_loop.val_loop._combined_loader is not None

    def _set_up_validation(self) -> None:
        if self.trainer.enable_validation and not self._validates_already:
            cast("ReplicaValidationLoop", self.epoch_loop.val_loop).set_up()

    def on_run_start(self) -> None:
        """Begin the fit. Validation data is set up on every rank now: a replacement cannot do it alone later."""
        self._set_up_validation()
        self.trainer.strategy.barrier("on_train_start")
        super().on_run_start()

    def on_advance_start(self) -> None:
        """Begin an epoch."""
        begin("epoch_start")
        super().on_advance_start()
        self._training.weights_may_differ()  # hooks of an epoch's end or start may have written to them

    def teardown(self) -> None:
        """Shut down all data workers."""
        take_out(self._combined_loader)
        super().teardown()
        deaths.release()

    def _epochs(self, resume: Snapshot | None) -> None:
        """Run the loop of `_FitLoop.run`, beginning inside an epoch where ``resume`` says so."""
        if resume is not None and resume.private.fresh and resume.place is None:
            resume = None
        while resume is not None or not self.done:
            try:
                if resume is None:
                    self.on_advance_start()
                start, resume = resume, None
                if start is not None and start.private.fresh and start.place == "epoch_end":
                    self._end_epoch(start)
                    continue
                cast("ReplicaEpochLoop", self.epoch_loop).resume = start
                self.advance()
                begin("epoch_end")
                self.on_advance_end()
            except StopIteration:
                break
            finally:
                self.on_iteration_done()

    def _end_epoch(self, loaded: Snapshot) -> None:
        """Do what `on_advance_end` does after its hooks."""
        connector, epoch_loop = self.trainer._logger_connector, self.epoch_loop
        connector._first_loop_iter = None
        connector.on_epoch_end()
        if epoch_loop._num_ready_batches_reached() and loaded.metrics_known:
            epoch_loop.update_lr_schedulers("epoch", update_plateau_schedulers=True)
        epoch_loop._batches_that_stepped -= 1
        connector.update_train_epoch_metrics()
        epoch_loop._batches_that_stepped += 1
        self.epoch_progress.increment_completed()


class ReplicaEpochLoop(_HasStrategy, _TrainingEpochLoop):
    """`_TrainingEpochLoop` that takes the snapshots and can begin in the middle of an epoch."""

    resume: Snapshot | None = None
    metrics_known = True

    def run(self, data_fetcher: Any) -> None:
        """Run the loop of `_TrainingEpochLoop.run`, beginning at `resume` where there is one."""
        resume, self.resume = self.resume, None
        joining = self.strategy.joining
        if resume is None:
            self.reset()
            if joining is not None:
                joining.agree()
            self.on_run_start(data_fetcher)
        data_fetcher._start_profiler, data_fetcher._stop_profiler = self._on_before_fetch, self._on_after_fetch
        rest = None if resume is None else self._rest(resume)
        while rest is not None or not self.done:
            try:
                if rest is not None:
                    finish, rest = rest, None
                    finish()
                else:
                    self.advance(data_fetcher)
                self.on_advance_end(data_fetcher)
            except StopIteration:
                break
            finally:
                self.metrics_known = True
                self.on_iteration_done()
        if joining is not None:
            self._end_joined_epoch(joining)

    def _rest(self, resume: Snapshot) -> Callable[[], None] | None:
        """Return what is left of the batch at which the loop continues, up to `on_advance_end`; None if nothing is."""
        if not resume.private.fresh:
            return partial(self._tail, resume) if resume.kind == "tail" else None
        self.metrics_known = resume.metrics_known
        if resume.place == "tail":
            return partial(self._tail, resume)
        if resume.schedulers_due:
            return self._step_schedulers
        if resume.place == "batch_end":
            return partial(self._end_loaded_batch, resume)
        return self._skip_validation if resume.place == "validation_end" else None

    def _step_schedulers(self) -> None:
        """Step the schedulers that follow an update."""
        self.update_lr_schedulers("step", update_plateau_schedulers=False)
        if self._num_ready_batches_reached():
            self.update_lr_schedulers("epoch", update_plateau_schedulers=False)

    def _skip_validation(self) -> None:
        self._skip_next_val = True

    def _end_loaded_batch(self, resume: Snapshot) -> None:
        """End a batch in which a callback's hook wrote the checkpoint: the module's hook comes after the callbacks'."""
        if isinstance(resume.local.batch, Shadow):
            self._end_shadow()
            return
        output, batch = resume.local.output, resume.local.batch
        self._results.batch = batch
        _call_lightning_module_hook(self.trainer, "on_train_batch_end", output, batch, self.batch_idx)
        self._end_batch()

    def _end_batch(self) -> None:
        self.trainer._logger_connector.on_batch_end()
        self.batch_progress.increment_completed()
        self.trainer._logger_connector.update_train_step_metrics()

    def update_lr_schedulers(self, interval: str, update_plateau_schedulers: bool) -> None:
        """Step schedulers, except plateau schedulers while the metrics that they follow are not known."""
        if self.metrics_known or not update_plateau_schedulers:
            super().update_lr_schedulers(interval, update_plateau_schedulers)

    def advance(self, data_fetcher: Any) -> None:
        """Run one batch. Take a snapshot first where a window of accumulated batches begins."""
        reach("batch_start")
        first_of_window = self.batch_progress.current.ready % self.trainer.accumulate_grad_batches == 0
        self.strategy.training.begin_batch(first_of_window)
        if self.strategy.joining is not None:
            data_fetcher = self._batch_or_shadow(self.strategy.joining, data_fetcher, first_of_window)
        if data_fetcher is not None:
            super().advance(data_fetcher)

    def _should_check_val_fx(self, data_fetcher: Any) -> bool:
        """Return whether a validation is due, and tell the watcher if so."""
        due: bool = super()._should_check_val_fx(data_fetcher)
        if due:
            begin("validation_start")
        return due

    def _tail(self, snapshot: Snapshot) -> None:
        """Do again what `advance` does after the update: hooks, schedulers, logging.

        The module's ``optimizer_step`` hook is called too, for what it does after ``optimizer.step``. The strategy
        skips the step itself.
        """
        trainer = self.trainer
        self._results.batch = snapshot.local.batch
        if isinstance(snapshot.local.batch, Shadow):
            if trainer.lightning_module.automatic_optimization:
                self.strategy.training.return_to_commit(snapshot)  # as the others do in their `optimizer_step`
            self.automatic_optimization.optim_progress.optimizer.step.increment_completed()
            self._finish_shadow()
            return
        if trainer.lightning_module.automatic_optimization:
            self._tail_of_optimization(snapshot)
        self.batch_progress.increment_processed()
        self._step_schedulers()
        output, batch = snapshot.local.output, snapshot.local.batch
        _call_callback_hooks(trainer, "on_train_batch_end", output, batch, self.batch_idx)
        _call_lightning_module_hook(trainer, "on_train_batch_end", output, batch, self.batch_idx)
        self._end_batch()

    def _tail_of_optimization(self, snapshot: Snapshot) -> None:
        trainer, strategy = self.trainer, self.strategy
        with strategy.step_is_done(snapshot):
            _call_lightning_module_hook(
                trainer,
                "optimizer_step",
                trainer.current_epoch,
                self.batch_idx,
                strategy._lightning_optimizers[0],
                lambda: snapshot.local.output.get("loss"),
            )
        self.automatic_optimization.optim_progress.optimizer.step.increment_completed()

    def _broadcast_sigterm_tensor(self) -> None:
        """Do nothing: Lightning's broadcast before every batch would swallow a fault and cost a round trip."""

    # A batch that this rank does not have

    def _batch_or_shadow(self, joining: Joining, fetcher: Any, first_of_window: bool) -> Any:
        """Fetch a batch; shadow the step if this rank has none.

        Returns:
            What the loop of Lightning fetches the batch from; None if the step has been shadowed.
        """
        item = joining.fetch(fetcher, self.batch_progress.current.ready)
        ranks = joining.averages_over
        if first_of_window and ranks is not None:
            self.strategy.training.state.average_over(ranks)
        if not isinstance(item[0], Shadow):
            return _Fetched(item, fetcher.done)
        if first_of_window:
            self.trainer.optimizers[0].zero_grad()
        self._shadow(item[0], fetcher.done)
        return None

    def _shadow(self, shadow: Shadow, done: bool) -> None:
        """Do what `advance` does with a batch, as far as it is not about a batch."""
        progress = self.batch_progress
        progress.is_last_batch = done
        progress.increment_ready()
        self.trainer._logger_connector.on_batch_start(shadow)
        self._call_callbacks_on_steps("on_train_batch_start", None, self.batch_idx)
        progress.increment_started()
        if not self._should_accumulate():
            self._step_without_batch()
        self._finish_shadow()

    def _step_without_batch(self) -> None:
        """Make the step. Hooks that may change a gradient are called: it is the gradient of this rank's shard, too."""
        trainer, training, optimization = self.trainer, self.strategy.training, self.automatic_optimization

        def prepare() -> None:
            training.before_backward(accumulating=False)
            training.after_backward(accumulating=False)
            _call_callback_hooks(trainer, "on_after_backward")
            _call_lightning_module_hook(trainer, "on_after_backward")

        cast("ReplicaOptimization", optimization).closure = closure = _NoBatch(prepare)
        steps = optimization.optim_progress.optimizer.step
        steps.increment_ready()
        trainer.strategy.optimizer_step(trainer.optimizers[0], closure, trainer.lightning_module)
        steps.increment_completed()

    def _finish_shadow(self) -> None:
        """Do what follows a step without a batch."""
        self.batch_progress.increment_processed()
        self._step_schedulers()
        self._call_callbacks_on_steps("on_train_batch_end", {}, None, self.batch_idx)
        self._call_join_hooks("on_shadow_step")
        self._end_shadow()

    def _end_shadow(self) -> None:
        """End a batch that this rank does not have. Nothing was logged in it, so loggers get nothing."""
        self.trainer._logger_connector.on_batch_end()
        self.batch_progress.increment_completed()

    def _end_joined_epoch(self, joining: Joining) -> None:
        """Tell callbacks that all ranks have joined."""
        if self.batch_progress.is_last_batch:
            self._call_join_hooks("on_join_end", joining.had_inputs(self.batch_progress.current.ready - 1))

    def _call_callbacks_on_steps(self, hook: str, *args: Any) -> None:
        callbacks: list[Any] = self.trainer.callbacks  # type: ignore[attr-defined]
        for callback in callbacks:
            if isinstance(callback, _ACT_ON_STEPS):
                getattr(callback, hook)(self.trainer, self.trainer.lightning_module, *args)

    def _call_join_hooks(self, hook: str, *args: Any) -> None:
        for _, call in named_hooks(self.trainer, hook):
            call(self.trainer, self.trainer.lightning_module, *args)


class _Fetched:
    """A fetcher that returns the batch that has been fetched."""

    def __init__(self, item: Any, done: bool) -> None:
        self._item, self._done = item, done

    @property
    def done(self) -> bool:
        """Whether no batch follows."""
        return self._done

    def __next__(self) -> Any:
        return self._item


class _NoBatch(Closure):
    """The closure of a step without a batch: there is no loss, and no backward pass."""

    def __init__(self, prepare: Callable[[], None]) -> None:
        super().__init__(ClosureResult(None))  # type: ignore[arg-type]
        self._prepare = prepare
        self._result = ClosureResult(None)

    def __call__(self, *_: Any, **__: Any) -> None:
        """Do what precedes a step."""
        self._prepare()


class ReplicaOptimization(_AutomaticOptimization):
    """`_AutomaticOptimization` that keeps the closure under way, so that its result can be read."""

    closure: Closure | None = None

    def _make_closure(self, kwargs: "OrderedDict[str, Any]", optimizer: Any, batch_idx: int) -> Closure:
        self.closure = super()._make_closure(kwargs, optimizer, batch_idx)
        return self.closure

    def output(self) -> dict[str, Any]:
        """Return what the closure has returned."""
        if self.closure is None or self.closure._result is None:
            raise ProtocolError("The commit was entered before the closure had run.")
        return self.closure._result.asdict()


class ReplicaManualOptimization(_HasStrategy, _ManualOptimization):
    """`_ManualOptimization` that commits once the training step, with all its optimizer steps, is done."""

    def run(self, kwargs: "OrderedDict[str, Any]") -> dict[str, Any]:
        """Run one training step and end its batch."""
        output: dict[str, Any] = super().run(kwargs)
        self.strategy.training.end_manual_batch(output)
        return output
