"""The structured configurations of the strategies, built from the signatures of their constructors."""

import dataclasses
import inspect
import types
import typing
from typing import Any, Literal, Union

from hydra.core.config_store import ConfigStore

from lightning_replica.megatron.megatron_strategy import MegatronReplicaStrategy
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


def schema_of(cls: type, name: str) -> type:
    """Return the structured configuration of a strategy, as Hydra checks it."""
    fields = [(argument, portable(hint), default) for argument, (hint, default) in arguments(cls).items()]
    return dataclasses.make_dataclass(name, [("_target_", str, f"lightning_replica.{cls.__name__}"), *fields])


StrategyConf = schema_of(ReplicaZeroStrategy, "StrategyConf")
MegatronStrategyConf = schema_of(MegatronReplicaStrategy, "MegatronStrategyConf")


def register() -> None:
    """Store the schemas in Hydra's ConfigStore."""
    for name, conf in (("strategy", StrategyConf), ("megatron_strategy", MegatronStrategyConf)):
        ConfigStore.instance().store(group=GROUP, name=name, node=conf, provider="lightning_replica")
