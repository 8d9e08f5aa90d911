"""What a Lightning checkpoint holds under this strategy, and how a fit takes it back."""

from collections.abc import Mapping
from typing import Any

import lightning.pytorch as pl
from torch import Tensor
from torch.optim import Optimizer

from lightning_replica import resume
from lightning_replica.checkpoint.full import gather_optimizer, load_optimizer
from lightning_replica.errors import ConfigurationError
from lightning_replica.snapshot import Snapshot
from lightning_replica.training import Training

# What other strategies have no use for, and drop when they write the checkpoint again.
OWN_KEY = "replica_zero"


class Checkpoints:
    """Lightning's checkpoint hooks: an ordinary ``.ckpt`` whose optimizer state is whole."""

    def __init__(self) -> None:
        self._main: dict[int, dict[int, Tensor]] = {}
        self._loaded: tuple[dict[str, Any], dict[str, Any]] | None = None

    def optimizer_state(self, training: Training, optimizer: Optimizer) -> dict[str, Any]:
        """The whole state of an optimizer on rank 0, nothing on other ranks. Collective."""
        sharded = training.sharded(optimizer)
        whole = gather_optimizer(sharded, training.groups, training.check)
        self._main[training.state.optimizers.index(sharded)] = whole.main
        return whole.state_dict

    def complete(self, trainer: pl.Trainer, training: Training, checkpoint: dict[str, Any]) -> None:
        """Adds what only this strategy reads. Collective over the world.

        That is main parameters, where weights have 16 bits, and where training stands (`resume.record`).
        """
        main, self._main = self._main, {}
        if "optimizer_states" in checkpoint:
            checkpoint[OWN_KEY] = {"main": main, "resume": resume.record(trainer, training)}

    def resumption(self, trainer: pl.Trainer, rank: int, world_size: int) -> Snapshot | None:
        """Where the fit goes on, if a checkpoint has been loaded; asked for once."""
        loaded, self._loaded = self._loaded, None
        return None if loaded is None else resume.read(trainer, rank, world_size, *loaded)

    def load_optimizers(self, training: Training, checkpoint: Mapping[str, Any]) -> None:
        """Gives every optimizer its part.

        Raises:
            ConfigurationError: If the checkpoint is another model's.
        """
        saved = checkpoint["optimizer_states"]
        training.state.follow_groups()
        if len(saved) != len(training.state.optimizers):
            raise ConfigurationError(
                f"The checkpoint holds the state of {len(saved)} optimizers, this model has"
                f" {len(training.state.optimizers)}. It was written for another `configure_optimizers`."
            )
        own = checkpoint.get(OWN_KEY, {})
        main = own.get("main", {})
        for number, (sharded, state) in enumerate(zip(training.state.optimizers, saved, strict=True)):
            load_optimizer(sharded, state, main.get(number))
        if "loops" in checkpoint:
            self._loaded = checkpoint["loops"]["fit_loop"], own.get("resume", {})
