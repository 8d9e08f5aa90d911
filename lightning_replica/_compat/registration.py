"""What the names of the strategies and the accelerator mean in a package of Lightning, before their classes are there.

`public` registers the classes themselves. That is not possible while a module of this package is what imports
Lightning, nor in that one of Lightning's packages which this process does not use.
"""

from collections.abc import Callable
from importlib import import_module
from typing import Any, NoReturn

from lightning_replica._compat.packages import VARIABLE, Package, chosen
from lightning_replica.errors import ConfigurationError

_PUBLIC = "lightning_replica.public"


def register_by_name(package: Package) -> None:
    """Register names that import their class when ``package`` asks for it."""

    def of(name: str) -> Callable[..., Any]:
        return lambda **options: getattr(import_module(_PUBLIC), name)(**options)

    _register(package, package.pytorch, "strategies", "StrategyRegistry", "replica_zero", of("ReplicaZeroStrategy"))
    _register(
        package,
        package.pytorch,
        "strategies",
        "StrategyRegistry",
        "replica_zero_megatron",
        of("MegatronReplicaStrategy"),
    )
    _register(package, package.pytorch, "accelerators", "AcceleratorRegistry", "npu", of("NPUAccelerator"))
    _register(package, package.fabric, "strategies", "STRATEGY_REGISTRY", "replica_zero", of("FabricStrategy"))


def refuse(package: Package) -> None:
    """Register each name of a strategy with ``package``, so that it raises an error that says which package to use."""

    def of(module: str) -> Callable[..., NoReturn]:
        def refused(**_: object) -> NoReturn:
            used = chosen()
            raise ConfigurationError(
                f"`replica_zero` works with {used.pytorch} in this process, and {module} asked for it. These are two"
                " packages of Lightning whose classes do not mix. Use one of them in the whole script: import"
                f" {module} before {used.pytorch} and lightning_replica, or set {VARIABLE}={package.name}."
            )

        return refused

    for name in ("replica_zero", "replica_zero_megatron"):
        _register(package, package.pytorch, "strategies", "StrategyRegistry", name, of(package.pytorch))
    _register(package, package.fabric, "strategies", "STRATEGY_REGISTRY", "replica_zero", of(package.fabric))


def _register(package: Package, module: str, part: str, registry: str, name: str, make: Callable[..., Any]) -> None:
    known = getattr(import_module(f"{module}.{part}"), registry)
    if name not in known:
        known.register(name, make, description=f"Of lightning_replica, for {package.name}.")
