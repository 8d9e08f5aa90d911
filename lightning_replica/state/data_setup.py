"""How loaders were made, if Lightning makes them more than once (``reload_dataloaders_every_n_epochs``).

Some data is drawn at random when its loader is made. A rank that goes back to a snapshot from before that, or a
replacement, makes the loaders as they were made for the snapshot: in the same epoch, from the same random state.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple, cast

from lightning_replica._compat.lightning_names import _Loop, pl
from lightning_replica.devices.host import rng_state, set_rng_state
from lightning_replica.state.data.in_loops import take_out


class DataSetup(NamedTuple):
    """How loaders were made.

    Attributes:
        epoch: The epoch in which they were made.
        random: The state of the generators before they were made.
    """

    epoch: int
    random: bytes


class RemembersSetup(_Loop):
    """A loop that remembers how its current loaders were made. As a base, it must precede the loop's own class."""

    data_setup: DataSetup | None = None
    _combined_loader: Any

    def setup_data(self) -> None:
        """Make loaders, unless there are some and no new ones are due.

        If this fails, as a fault calls the rank back while it waits for the others, the loop is as before. It would
        otherwise count as one that has made its loaders in this epoch, and not make them when the step is done again.
        """
        before, random = dict(vars(self)), rng_state()
        try:
            super().setup_data()  # type: ignore[misc]
        except BaseException:
            if self._combined_loader is not before["_combined_loader"]:
                take_out(self._combined_loader)
            vars(self).clear()
            vars(self).update(before)
            raise
        if self._combined_loader is not before["_combined_loader"]:
            self.data_setup = DataSetup(self.trainer.current_epoch, random)

    def set_up(self) -> None:
        """Make loaders, with the trainer in the state in which this loop makes them."""
        self.setup_data()

    def set_up_as(self, setup: DataSetup) -> None:
        """Make loaders as ``setup`` says, where this rank has others: those of a replacement, or of the next epoch."""
        take_out(self._combined_loader)
        self._combined_loader = None
        with _as_when(self.trainer, setup):
            self.set_up()


def take(trainer: pl.Trainer) -> list[DataSetup | None]:
    """Return how the loaders of the training and of its validations were made; nothing if they are made only once."""
    again: Any = trainer
    return [loop.data_setup for loop in _loops(trainer)] if again.reload_dataloaders_every_n_epochs else []


def put_back(trainer: pl.Trainer, setups: Sequence[DataSetup | None]) -> None:
    """Make the loaders that `take` has described, where others are in their place."""
    for loop, setup in zip(_loops(trainer), setups, strict=False):
        if setup is not None and loop.data_setup != setup:
            loop.set_up_as(setup)


def _loops(trainer: pl.Trainer) -> tuple[Any, Any]:
    return trainer.fit_loop, trainer.fit_loop.epoch_loop.val_loop


@contextmanager
def _as_when(trainer: pl.Trainer, setup: DataSetup) -> Iterator[None]:
    """Set the epoch and the random state of that time, and ask no other rank: other ranks do not make loaders now."""
    progress, strategy = trainer.fit_loop.epoch_progress.current, cast("Any", trainer.strategy)
    epoch, progress.completed = progress.completed, setup.epoch
    set_rng_state(setup.random)
    try:
        with strategy.by_itself():
            yield
    finally:
        progress.completed = epoch
