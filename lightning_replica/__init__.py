"""A PyTorch Lightning strategy with which a training job loses no step and no bit when ranks fail.

Importing it registers the strategies ``replica_zero`` (of Trainer and of Fabric) and ``replica_zero_megatron`` and the
accelerator ``npu`` by their names, and does nothing else; but in a rank, it has the supervisor see it (`launch.rank`).
"""

from lightning.fabric.strategies import STRATEGY_REGISTRY
from lightning.pytorch.accelerators import AcceleratorRegistry
from lightning.pytorch.strategies import StrategyRegistry

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
from lightning_replica.fabric.strategy import FabricStrategy
from lightning_replica.launch.rank import enter as _enter
from lightning_replica.megatron.strategy import MegatronReplicaStrategy
from lightning_replica.sharding.replica_optimizer import ReplicaOptimizer
from lightning_replica.trainer.strategy import ReplicaZeroStrategy

__version__ = "0.1.0.dev0"
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
    "__version__",
    "register_fault",
]

ReplicaZeroStrategy.register_strategies(StrategyRegistry)
MegatronReplicaStrategy.register_strategies(StrategyRegistry)
FabricStrategy.register_strategies(STRATEGY_REGISTRY)
NPUAccelerator.register_accelerators(AcceleratorRegistry)
_enter()
