"""A PyTorch Lightning strategy with which a training job loses no step and no bit when ranks fail.

Importing it registers the strategies ``replica_zero`` (of Trainer and of Fabric) and ``replica_zero_megatron`` and the
accelerator ``npu`` by their names, as soon as Lightning is imported, and does nothing else; but in a rank, it has the
supervisor see it (`launch.rank`).
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from lightning_replica._compat import packages as _packages
from lightning_replica._compat import started as _started  # noqa: F401
from lightning_replica._version import __version__
from lightning_replica.launch.rank import enter as _enter

if TYPE_CHECKING:
    from lightning_replica.public import *  # noqa: F403
# ruff: noqa: F405

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


def __getattr__(name: str) -> Any:
    """Import a public name when it is first asked for, and Lightning with it, if that is not imported yet."""
    if name == "callbacks":
        return import_module("lightning_replica.callbacks")
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = globals()[name] = getattr(import_module("lightning_replica.public"), name)
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})


def _register(package: _packages.Package) -> None:
    if package is not _packages.chosen():
        import_module("lightning_replica._compat.registration").refuse(package)
    elif _packages.is_being_imported("lightning_replica._compat.lightning_names"):
        # A module of this package imports Lightning, and must be complete before others can use it.
        import_module("lightning_replica._compat.registration").register_by_name(package)
    else:
        import_module("lightning_replica.public")


_enter()
_packages.on_import(_register)
