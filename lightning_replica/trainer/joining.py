"""Ranks that have different numbers of training batches, and go on together.

With ``uneven_inputs="join"``, a rank whose data has ended goes on as a shadow: it makes every step with the others, but
with a gradient of zero, until no rank has inputs. Names and averages are those of
``torch.distributed.algorithms.Join``. See docs/uneven_inputs.md. Without it, different numbers are an error
(lengths.py).
"""

from collections.abc import Callable
from typing import Any, Literal, TypeAlias, cast

from lightning_replica._compat.lightning_names import _DataLoaderIterDataFetcher, pl
from lightning_replica.core import checks
from lightning_replica.errors import ConfigurationError
from lightning_replica.state.data.fetches import inputs_of
from lightning_replica.state.data.inputs import Inputs, Shadow
from lightning_replica.trainer.lengths import UNSIZED, describe, gather, lengths_of, named

UnevenInputs: TypeAlias = Literal["join"] | None


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
        loop = self._loop
        return Inputs(self._rank, lambda: loop.lengths, lambda: loop._data_fetcher.fetched, self._ask)

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
                f'`uneven_inputs="join"` needs one batch on each rank in every epoch, but there are: {describe(found)}.'
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

    def fetch(self, fetcher: Any, number: int) -> Any:
        """Fetch what the loop of Lightning trains on next, and note which ranks have a batch.

        Args:
            fetcher: Lightning's.
            number: The batch's position in the epoch.

        Returns:
            What the fetcher returns, with a `Shadow` in place of the batch if this rank has none.

        Raises:
            ConfigurationError: If this rank has no batch in the whole epoch.
        """
        item = next(fetcher)
        self._present = self._of_epoch.present(number, len(getattr(fetcher, "batches", ())))
        if isinstance(item[0], Shadow) and not number:
            raise ConfigurationError(
                f'`uneven_inputs="join"` needs one batch on each rank in every epoch, but rank {self._rank} has none.'
            )
        return item

    @property
    def averages_over(self) -> int | None:
        """Over how many ranks the gradients of the step are averaged; None for all."""
        return None if self._divides_by_all else sum(self._present)

    def had_inputs(self, number: int) -> bool:
        """Return whether this rank had a batch in a step of the epoch."""
        return self._of_epoch.present(number, 0)[self._rank]

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
                return max(rank for rank, is_present in enumerate(present) if is_present)
        return 0

    @property
    def _loop(self) -> Any:
        """Lightning's fit loop; its ``lengths`` goes back with a step."""
        return self._trainer.fit_loop

    @property
    def _of_epoch(self) -> Inputs:
        return cast("Inputs", inputs_of(self._loop._combined_loader))
