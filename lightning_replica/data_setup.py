"""How loaders were made, where Lightning makes them again and again (``reload_dataloaders_every_n_epochs``).

Some data is drawn when its loader is made. A rank that goes back to before that, or a replacement, makes the loaders as
they were made then: in that epoch, from that random state.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple, cast

import lightning.pytorch as pl

from lightning_replica._compat.lightning import _Loop
from lightning_replica.data.in_loops import take_out
from lightning_replica.devices.host import rng_state, set_rng_state


class DataSetup(NamedTuple):
    """How loaders were made.

    Attributes:
        epoch: The epoch.
        random: The state of the generators before that.
    """

    epoch: int
    random: bytes


class RemembersSetup(_Loop):
    """A loop that remembers how the loaders in place were made. Has to stand before the loop's own class."""

    data_setup: DataSetup | None = None
    _combined_loader: Any

    def setup_data(self) -> None:
        """Makes loaders, unless there are some and none are due."""
        before, random = self._combined_loader, rng_state()
        super().setup_data()  # type: ignore[misc]
        if self._combined_loader is not before:
            self.data_setup = DataSetup(self.trainer.current_epoch, random)

    def set_up(self) -> None:
        """Has loaders made in the state that the trainer is in then."""
        self.setup_data()

    def set_up_as(self, setup: DataSetup) -> None:
        """Makes loaders as they were made then, where this rank has others: a replacement's, or the next epoch's."""
        take_out(self._combined_loader)
        self._combined_loader = None
        with _as_when(self.trainer, setup):
            self.set_up()


def take(trainer: pl.Trainer) -> list[DataSetup | None]:
    """How the loaders of the training and of its validations were made; nothing where they are made only once."""
    again: Any = trainer
    return [loop.data_setup for loop in _loops(trainer)] if again.reload_dataloaders_every_n_epochs else []


def put_back(trainer: pl.Trainer, setups: Sequence[DataSetup | None]) -> None:
    """Makes the loaders as `take` has seen them, where others are in their place."""
    for loop, setup in zip(_loops(trainer), setups, strict=False):
        if setup is not None and loop.data_setup != setup:
            loop.set_up_as(setup)


def _loops(trainer: pl.Trainer) -> tuple[Any, Any]:
    return trainer.fit_loop, trainer.fit_loop.epoch_loop.val_loop


@contextmanager
def _as_when(trainer: pl.Trainer, setup: DataSetup) -> Iterator[None]:
    """With the epoch and the random state of that time, and no other rank to ask: none of them does the same."""
    progress, strategy = trainer.fit_loop.epoch_progress.current, cast("Any", trainer.strategy)
    epoch, progress.completed = progress.completed, setup.epoch
    set_rng_state(setup.random)
    try:
        with strategy.by_itself():
            yield
    finally:
        progress.completed = epoch
