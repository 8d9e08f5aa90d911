"""What modules hold that `torch.jit` has compiled: attributes that live in C++, and parts that cannot change."""

from collections.abc import Mapping
from typing import Any, Final

import torch

from lightning_replica._compat.versions import need, private_names_of

with private_names_of("torch"):
    SCRIPT: Final[Any] = torch._C.ScriptModule
    """The part of a compiled module that has its attributes."""
    CONSTANT: Final[tuple[Any, ...]] = (
        *(torch._C.ConcreteModuleType, torch._C.ScriptMethod, torch._C.ScriptFunction),
        *(torch._C.ParameterDict, torch._C.BufferDict, torch._C.ModuleDict),
    )
    """Parts that cannot change, or are views of what `attributes_of` returns."""
    need(torch._C.ScriptModule, "getattr", "setattr", "_type")
    need(torch._C.ConcreteModuleType, "from_jit_type", "get_attributes")


def attributes_of(script: Any) -> Mapping[str, Any]:
    """Return parameters, buffers and attributes: tensors themselves, numbers and texts, copies of lists and dicts."""
    kinds = torch._C.ConcreteModuleType.from_jit_type(script._type()).get_attributes()  # type: ignore[attr-defined]
    return {name: script.getattr(name) for name in kinds}


def set_attribute(script: Any, name: str, value: Any) -> None:
    """Set one of `attributes_of`."""
    script.setattr(name, value)
