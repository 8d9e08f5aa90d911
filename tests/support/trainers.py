"""What the types of Lightning leave open, where a test knows more."""

from typing import Any

import lightning as L
from lightning.pytorch.callbacks import Callback
from lightning.pytorch.core.optimizer import LightningOptimizer

from lightning_replica import ReplicaZeroStrategy
from lightning_replica.sharding.state import ShardedState


def strategy_of(trainer: L.Trainer) -> ReplicaZeroStrategy:
    """The strategy, which is ours."""
    assert isinstance(trainer.strategy, ReplicaZeroStrategy)
    return trainer.strategy


def state_of(strategy: ReplicaZeroStrategy) -> ShardedState:
    """The sharded state, with what `Engine` does not have; it exists only while fitting."""
    assert isinstance(strategy.state, ShardedState)
    return strategy.state


def callbacks_of(trainer: L.Trainer) -> list[Callback]:
    """The list of callbacks, which Lightning's connector gives to the trainer."""
    callbacks: list[Callback] = trainer.callbacks  # type: ignore[attr-defined]
    return callbacks


def optimizer_of(module: L.LightningModule) -> LightningOptimizer:
    """The only optimizer."""
    optimizer: Any = module.optimizers()
    assert isinstance(optimizer, LightningOptimizer)
    return optimizer
