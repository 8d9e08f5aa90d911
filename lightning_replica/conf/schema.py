"""The structured configuration of the strategy, built from the signature of its constructor."""

import dataclasses
import inspect
import types
import typing
from typing import Any, Literal, Union

from hydra.core.config_store import ConfigStore

from lightning_replica.trainer.strategy import ReplicaZeroStrategy

GROUP = "lightning_replica/schema"  # not `strategy`: users do not choose a schema
_PLAIN = (bool, int, float, str, type(None))


def portable(hint: Any) -> Any:
    """Return the nearest type that OmegaConf can check.

    ``Literal`` becomes the type of its words; the constructor refuses a wrong word. A type that is not made of plain
    values, such as a plugin given by ``_target_``, becomes ``Any``.
    """
    if hint in _PLAIN:
        return hint
    if typing.get_origin(hint) is Literal:
        return Union[tuple(type(word) for word in typing.get_args(hint))]  # noqa: UP007  a computed union
    if typing.get_origin(hint) in (Union, types.UnionType):
        members = [portable(member) for member in typing.get_args(hint)]
        return Any if Any in members else Union[tuple(members)]  # noqa: UP007
    return Any


def arguments(cls: type) -> dict[str, tuple[Any, Any]]:
    """Return every argument of a constructor: name -> (type, default)."""
    hints = typing.get_type_hints(cls.__init__)  # type: ignore[misc]  # looked at, not called
    parameters = list(inspect.signature(cls.__init__).parameters.values())[1:]  # type: ignore[misc]
    return {p.name: (hints[p.name], p.default) for p in parameters}


StrategyConf = dataclasses.make_dataclass(
    "StrategyConf",
    [("_target_", str, "lightning_replica.ReplicaZeroStrategy")]
    + [(name, portable(hint), default) for name, (hint, default) in arguments(ReplicaZeroStrategy).items()],
)
StrategyConf.__doc__ = "`ReplicaZeroStrategy`, as Hydra checks it."


def register() -> None:
    """Store the schemas in Hydra's ConfigStore."""
    ConfigStore.instance().store(group=GROUP, name="strategy", node=StrategyConf, provider="lightning_replica")
