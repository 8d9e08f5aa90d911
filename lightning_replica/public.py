"""The public names, all of which need Lightning. They are registered with it when they are imported."""

from lightning_replica._compat.lightning_names import STRATEGY_REGISTRY, AcceleratorRegistry, StrategyRegistry
from lightning_replica.accelerators import NPUAccelerator
from lightning_replica.callbacks import (
    CheckpointPublisher,
    DyingGaspCheckpoint,
    JoinCallback,
    PeerRepair,
    RankReplacement,
    RecoveryCallback,
    RecoveryReport,
    StepRollback,
)
from lightning_replica.devices.registered import register_fault
from lightning_replica.errors import ConfigurationError, RecoveryError, ReplicaError
from lightning_replica.fabric.fabric_strategy import FabricStrategy
from lightning_replica.megatron.megatron_strategy import MegatronReplicaStrategy
from lightning_replica.sharding.replica_optimizer import ReplicaOptimizer
from lightning_replica.trainer.strategy import ReplicaZeroStrategy

__all__ = [
    "CheckpointPublisher",
    "ConfigurationError",
    "DyingGaspCheckpoint",
    "FabricStrategy",
    "JoinCallback",
    "MegatronReplicaStrategy",
    "NPUAccelerator",
    "PeerRepair",
    "RankReplacement",
    "RecoveryCallback",
    "RecoveryError",
    "RecoveryReport",
    "ReplicaError",
    "ReplicaOptimizer",
    "ReplicaZeroStrategy",
    "StepRollback",
    "register_fault",
]


ReplicaZeroStrategy.register_strategies(StrategyRegistry)
MegatronReplicaStrategy.register_strategies(StrategyRegistry)
FabricStrategy.register_strategies(STRATEGY_REGISTRY)
NPUAccelerator.register_accelerators(AcceleratorRegistry)
