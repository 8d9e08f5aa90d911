"""One walk over a module and all its parts, shared by all parts of a snapshot that need them."""

import operator
from collections.abc import Iterable
from dataclasses import dataclass, field
from functools import cached_property
from itertools import chain, compress
from typing import Any

import torch
from torch import Tensor, nn

from lightning_replica._compat.dtensor import local_of
from lightning_replica._compat.versions import need, private_names_of

with private_names_of("torch"):
    need(nn.Module(), "_modules", "_forward_pre_hooks", "_buffers", "_parameters")

_values = operator.methodcaller("values")
_keys = operator.methodcaller("keys")  # the tables of a module of torch.jit are no dicts, and have no iterator


@dataclass(frozen=True)
class Tree:
    """The parts of a module at one moment; user code may change submodules, parameters and buffers later.

    Attributes:
        modules: The module and its submodules, in the order of ``modules()``.
        parameters: The parameters, in the order of ``parameters()``.
        buffers: The buffers by name, in the order of ``named_buffers()``; of a DTensor, the part that this rank has.
    """

    modules: list[nn.Module]
    parameters: list[nn.Parameter]
    buffers: dict[str, Tensor]
    _marks: "_Marks" = field(repr=False, compare=False)
    _of: dict[type, list[Any]] = field(default_factory=dict, init=False, repr=False, compare=False)

    @classmethod
    def of(cls, module: nn.Module, former: "Tree | None" = None) -> "Tree":
        """Return the tree of a module.

        One walk finds everything; torch's own iterators walk once for each kind, and take several times as long. To see
        that a module is as it was takes a sixth of a walk.

        Args:
            module: The module.
            former: Its tree at an earlier moment. It is returned if it is still the same.
        """
        if former is not None and former.modules[0] is module and former._marks.hold():
            return former
        modules: dict[int, nn.Module] = {}  # by identity, like parameters and buffers: each is listed once
        parameters: dict[int, nn.Parameter] = {}
        buffers: dict[int, tuple[str, Tensor]] = {}
        ahead = [("", module)]
        while ahead:
            prefix, current = ahead.pop()
            if id(current) in modules:
                continue
            modules[id(current)] = current
            for parameter in current._parameters.values():
                if parameter is not None:
                    parameters[id(parameter)] = parameter
            for name, buffer in current._buffers.items():
                if buffer is not None:
                    buffers.setdefault(id(buffer), (prefix + name, local_of(buffer)))
            children = [(f"{prefix}{name}.", child) for name, child in current._modules.items() if child is not None]
            ahead += children[::-1]
        found = list(modules.values())
        return cls(found, list(parameters.values()), dict(buffers.values()), _Marks(found))

    def all_of(self, cls: type) -> list[Any]:
        """Return the modules that are instances of a class."""
        if cls not in self._of:
            self._of[cls] = [module for module in self.modules if isinstance(module, cls)]
        return self._of[cls]

    @cached_property
    def order(self) -> dict[int, int]:
        """The position of every parameter, by ``id``."""
        return {id(parameter): place for place, parameter in enumerate(self.parameters)}

    @cached_property
    def _pre_hooks(self) -> list[dict[int, Any]]:
        return [module._forward_pre_hooks for module in self.modules]

    def hooked(self) -> list[int]:
        """Return the numbers of the modules that have hooks before their forward pass now."""
        return list(compress(range(len(self.modules)), self._pre_hooks))


def registered(module: nn.Module) -> tuple[dict[str, Any], dict[str, Any], dict[str, Any]]:
    """Return the tables in which a module registers its submodules, its parameters and its buffers.

    Those of a module of torch.jit are no dicts, and cannot change.
    """
    if isinstance(module, torch.jit.ScriptModule):
        return {}, {}, {}
    return module._modules, module._parameters, module._buffers


class _Marks:
    """What shows that modules still have the same parameters, buffers and submodules.

    These are the entries of three dicts of each module, which are the same dicts as long as the module lives.

    Args:
        modules: The modules.
    """

    def __init__(self, modules: Iterable[nn.Module]) -> None:
        books: list[dict[str, Any]] = []
        for module in modules:
            books += [module._parameters, module._buffers, module._modules]
        self._books, self._sizes = books, list(map(len, books))
        self._filled = [book for book in books if book]
        self._values = list(chain.from_iterable(map(_values, self._filled)))
        self._names = list(chain.from_iterable(map(_keys, self._filled)))

    def hold(self) -> bool:
        """Return whether all entries are the same objects as before, under the same names."""
        return (
            list(map(len, self._books)) == self._sizes
            and all(map(operator.is_, chain.from_iterable(map(_values, self._filled)), self._values))
            and list(chain.from_iterable(map(_keys, self._filled))) == self._names
        )
