"""Ranks that have different numbers of training batches, and go on together.

With ``uneven_inputs="join"``, a rank whose data has ended goes on as a shadow: it makes every step with the others, but
with a gradient of zero, until no rank has inputs. Names and averages are those of
``torch.distributed.algorithms.Join``. See docs/uneven_inputs.md. Without it, different numbers are an error
(lengths.py).
"""

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Literal, TypeAlias, cast

from lightning_replica._compat.lightning_names import (
    Checkpoint,
    Closure,
    ClosureResult,
    LearningRateMonitor,
    ProgressBar,
    Timer,
    WeightAveraging,
    _call_callback_hooks,
    _call_lightning_module_hook,
    _DataLoaderIterDataFetcher,
    pl,
)
from lightning_replica.core import checks
from lightning_replica.errors import ConfigurationError
from lightning_replica.state.data.inputs import Inputs, Shadow
from lightning_replica.trainer.hooks import named_hooks
from lightning_replica.trainer.lengths import UNSIZED, gather, lengths_of, named, told

if TYPE_CHECKING:
    from lightning_replica.trainer.fit_loop import ReplicaEpochLoop, ReplicaFitLoop
    from lightning_replica.trainer.steps import Training

UnevenInputs: TypeAlias = Literal["join"] | None

# Callbacks that act on steps and use no batch. They meet other ranks, or must be the same on all.
_ACT_ON_STEPS = (Checkpoint, LearningRateMonitor, ProgressBar, Timer, WeightAveraging)


def check_uneven_inputs(
    uneven_inputs: UnevenInputs, divide_by_initial_world_size: bool, tensor_parallel_size: int
) -> None:
    """Check the strategy's arguments.

    Raises:
        ConfigurationError: If one makes no sense, or they do not go together.
    """
    checks.choice("uneven_inputs", uneven_inputs, (None, "join"))
    checks.choice("divide_by_initial_world_size", divide_by_initial_world_size, (True, False))
    if uneven_inputs is not None and tensor_parallel_size > 1:
        raise ConfigurationError(
            f"{uneven_inputs=} does not go together with {tensor_parallel_size=}: ranks that share layers need the same"
            " batches. Leave one of them out."
        )
    if uneven_inputs is None and not divide_by_initial_world_size:
        raise ConfigurationError(
            f'{divide_by_initial_world_size=} has no effect without `uneven_inputs="join"`. Set both, or none.'
        )


class _NoBatch(Closure):
    """The closure of a step without a batch: there is no loss, and no backward pass."""

    def __init__(self, prepare: Callable[[], None]) -> None:
        super().__init__(ClosureResult(None))  # type: ignore[arg-type]
        self._prepare = prepare
        self._result = ClosureResult(None)

    def __call__(self, *_: Any, **__: Any) -> None:
        """Do what precedes a step."""
        self._prepare()


class Joining:
    """Lets a rank that has no further inputs shadow the steps of those that have.

    Args:
        trainer: The trainer.
        divide_by_initial_world_size: Whether gradients are averaged over all ranks. Otherwise they are averaged over
            the ranks that have a batch in the step.

    """

    def __init__(self, trainer: pl.Trainer, divide_by_initial_world_size: bool) -> None:
        self._trainer, self._rank = trainer, trainer.global_rank
        self._divides_by_all = divide_by_initial_world_size
        self._inputs: Inputs | None = None
        self._present: tuple[bool, ...] = ()
        self._in_training_step = False

    # The data

    def inputs(self) -> Inputs:
        """Return what a combined loader of the training fetches by.

        Raises:
            ConfigurationError: If steps cannot be shadowed.
        """
        module = self._trainer.lightning_module
        if not module.automatic_optimization:
            raise ConfigurationError(
                f'`uneven_inputs="join"` needs automatic optimization, but {type(module).__name__} steps its optimizers'
                " itself: a rank without inputs cannot know which. Remove the option."
            )
        loop: Any = self._loop
        self._inputs = Inputs(self._rank, lambda: loop.lengths, lambda: loop._data_fetcher.fetched, self._ask)
        return self._inputs

    def _ask(self, has: bool) -> list[bool]:
        return [bool(each) for each in gather(self._trainer.strategy, has)]

    def agree(self) -> None:
        """Tell each other how many batches the epoch has. Collective; called when loaders are new, and every epoch.

        Raises:
            ConfigurationError: If a rank has no batch at all.
        """
        loop = self._loop
        found = lengths_of(self._trainer)
        if len(found) != self._trainer.world_size:
            return  # loaders are made again, by this rank alone: the snapshot that it restores has the lengths
        if 0 in found:
            raise ConfigurationError(
                f'`uneven_inputs="join"` needs one batch on each rank in every epoch, but there are: {told(found)}.'
            )
        loop.lengths = () if UNSIZED in found else tuple(found)
        if loop.lengths:
            loop.max_batches = max(loop.lengths)  # a sampler may have fewer batches in a later epoch

    def check_fetcher(self, fetcher: Any) -> None:
        """Raise if the module fetches by itself.

        Raises:
            ConfigurationError: If it does.
        """
        if isinstance(fetcher, _DataLoaderIterDataFetcher):
            raise ConfigurationError(
                '`uneven_inputs="join"` does not work with `training_step(self, dataloader_iter)`, which fetches'
                " batches by itself. Take `batch` as the argument."
            )

    # A batch

    def advance(self, loop: "ReplicaEpochLoop", fetcher: Any, training: "Training", first_of_window: bool) -> Any:
        """Fetch a batch.

        Returns:
            What the loop of Lightning fetches the batch from; None if there was none, and the step has been shadowed.
        """
        item, number = next(fetcher), loop.batch_progress.current.ready
        inputs = self._of_epoch
        self._present = inputs.present(number, len(getattr(fetcher, "batches", ())))
        if first_of_window and not self._divides_by_all:
            training.state.average_over(sum(self._present))
        if not isinstance(item[0], Shadow):
            return _Fetched(item, fetcher.done)
        if not number:
            raise ConfigurationError(
                f'`uneven_inputs="join"` needs one batch on each rank in every epoch, but rank {self._rank} has none.'
            )
        if first_of_window:
            self._trainer.optimizers[0].zero_grad()
        self._shadow(loop, item[0], fetcher.done, training)
        return None

    def _shadow(self, loop: "ReplicaEpochLoop", shadow: Shadow, done: bool, training: "Training") -> None:
        """Do what the loop of Lightning does with a batch, as far as it is not about a batch."""
        progress = loop.batch_progress
        progress.is_last_batch = done
        progress.increment_ready()
        self._trainer._logger_connector.on_batch_start(shadow)
        self._of_callbacks("on_train_batch_start", None, loop.batch_idx)
        progress.increment_started()
        if not loop._should_accumulate():
            self._step(loop, training)
        self.finish(loop)

    def _step(self, loop: "ReplicaEpochLoop", training: "Training") -> None:
        """Make the step. Hooks that may change a gradient are called: it is the gradient of this rank's shard, too."""
        trainer, module, optimization = self._trainer, self._trainer.lightning_module, loop.automatic_optimization

        def prepare() -> None:
            training.before_backward(accumulating=False)
            training.after_backward()
            _call_callback_hooks(trainer, "on_after_backward")
            _call_lightning_module_hook(trainer, "on_after_backward")

        cast("Any", optimization).closure = closure = _NoBatch(prepare)
        steps = optimization.optim_progress.optimizer.step
        steps.increment_ready()
        trainer.strategy.optimizer_step(trainer.optimizers[0], closure, module)
        steps.increment_completed()

    def finish(self, loop: "ReplicaEpochLoop") -> None:
        """Do what follows a step without a batch; again, if the step is not made again."""
        loop.batch_progress.increment_processed()
        loop._step_schedulers()
        self._of_callbacks("on_train_batch_end", {}, None, loop.batch_idx)
        self._of_joins("on_shadow_step")
        self.end_batch(loop)

    def end_batch(self, loop: "ReplicaEpochLoop") -> None:
        """End a batch that this rank does not have. Nothing was logged in it, so loggers get nothing."""
        self._trainer._logger_connector.on_batch_end()
        loop.batch_progress.increment_completed()

    def redo(self, loop: "ReplicaEpochLoop") -> None:
        """Do again what follows the step of a shadow, which has been made."""
        loop.automatic_optimization.optim_progress.optimizer.step.increment_completed()
        self.finish(loop)

    def training_step(self, step: Callable[[], Any]) -> Any:
        """Run the training step of a rank that has a batch."""
        self._in_training_step = True
        try:
            return step()
        finally:
            self._in_training_step = False

    def check_collective(self) -> None:
        """Raise in a training step that not all ranks run in every batch of the epoch.

        A collective must not work at the beginning of an epoch and fail at its end.

        Raises:
            ConfigurationError: In such a training step.
        """
        lengths = self._loop.lengths
        short = [rank for rank, length in enumerate(lengths) if length < max(lengths)]
        if not self._in_training_step or (lengths and not short):
            return
        who = f"{named(short)} will have no inputs left" if short else "other ranks may have no inputs left"
        raise ConfigurationError(
            f"The training step calls a collective, but {who} in this epoch, and will not run it. Log with"
            " `sync_dist=True` at the end of the epoch (`on_step=False, on_epoch=True`), and call collectives in hooks"
            " of the epoch."
        )

    @property
    def source(self) -> int:
        """The rank whose buffers all get after a step: the highest that has a batch in the next, as under DDP.

        After the last step of an epoch it is the highest that had a batch in that one, before any step it is rank 0.
        """
        ready = self._loop.epoch_loop.batch_progress.current.ready
        for present in (self._of_epoch.present(ready, 0), self._present, self._of_epoch.present(ready - 1, 0)):
            if any(present):  # a replacement and a fit that resumes have not begun a step
                return max(rank for rank, here in enumerate(present) if here)
        return 0

    def end_epoch(self, loop: "ReplicaEpochLoop") -> None:
        """Tell callbacks that all ranks have joined."""
        if loop.batch_progress.is_last_batch:
            last = self._of_epoch.present(loop.batch_progress.current.ready - 1, 0)
            self._of_joins("on_join_end", last[self._rank])

    # Callbacks

    def _of_callbacks(self, hook: str, *args: Any) -> None:
        for callback in cast("Any", self._trainer).callbacks:
            if isinstance(callback, _ACT_ON_STEPS):
                getattr(callback, hook)(self._trainer, self._trainer.lightning_module, *args)

    def _of_joins(self, hook: str, *args: Any) -> None:
        for _, call in named_hooks(self._trainer, hook):
            call(self._trainer, self._trainer.lightning_module, *args)

    @property
    def _loop(self) -> "ReplicaFitLoop":
        return cast("ReplicaFitLoop", self._trainer.fit_loop)

    @property
    def _of_epoch(self) -> Inputs:
        return cast("Inputs", self._inputs)


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
