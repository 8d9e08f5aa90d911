"""What the names of the strategies mean in that one of Lightning's packages which this process does not use."""

from importlib import import_module
from typing import NoReturn

from lightning_replica._compat.packages import VARIABLE, Package, chosen
from lightning_replica.errors import ConfigurationError

_OF_TRAINER = ("replica_zero", "replica_zero_megatron")
_OF_FABRIC = ("replica_zero",)


def refuse(package: Package) -> None:
    """Register each name of a strategy with ``package``, so that it raises an error that says which package to use."""

    def refused(**_: object) -> NoReturn:
        used = chosen()
        raise ConfigurationError(
            f"`replica_zero` works with {used.pytorch} in this process, and {package.pytorch} asked for it. These are"
            " two packages of Lightning whose classes do not mix. Use one of them in the whole script: import"
            f" {package.pytorch} before {used.pytorch} and lightning_replica, or set {VARIABLE}={package.name}."
        )

    for module, registry, names in (
        (package.pytorch, "StrategyRegistry", _OF_TRAINER),
        (package.fabric, "STRATEGY_REGISTRY", _OF_FABRIC),
    ):
        known = getattr(import_module(f"{module}.strategies"), registry)
        for name in names:
            if name not in known:
                known.register(name, refused, description=f"Not in this process, which uses {chosen().pytorch}.")
