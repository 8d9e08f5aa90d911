"""What an optimizer of the user's class keeps in attributes of its own, beside the state that torch knows of.

A counter that each update raises belongs to the shard: it follows the updates, and all holders of a shard have the
same. So it is sent with the shard, and goes back with it where a batch makes more than one update.
"""

import types
from collections.abc import Collection, Mapping
from functools import cache
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.optim import SGD, Optimizer

from lightning_replica.core import plain

_FUNCTIONS = (types.FunctionType, types.MethodType, types.BuiltinFunctionType)


class OwnAttributes(NamedTuple):
    """The attributes of one optimizer.

    Attributes:
        packed: What they hold, by name.
        left: The names of those that cannot be packed.
    """

    packed: dict[str, bytes]
    left: list[str]


def attributes_of(optimizer: Optimizer) -> OwnAttributes:
    """Return what an optimizer's own attributes hold; without functions, and lists of the parameters."""
    found = OwnAttributes({}, [])
    for name, value in vars(optimizer).items():
        if name in _of_torch() or isinstance(value, _FUNCTIONS) or _are_parameters(value):
            continue
        try:
            if _refers_to_parameters(value):
                raise plain.NotPlainError("parameters are those of this process")
            found.packed[name] = plain.pack(value)
        except plain.NotPlainError:
            found.left.append(name)
    return found


def set_attributes(optimizer: Optimizer, packed: Mapping[str, bytes], kept: Collection[str] | None = None) -> None:
    """Give an optimizer the attributes that `attributes_of` has packed.

    Args:
        optimizer: The optimizer.
        packed: What they held.
        kept: The names of further attributes that there were; others are removed. None if others may stay.
    """
    now = attributes_of(optimizer).packed
    for name, data in packed.items():
        if now.get(name) != data:
            setattr(optimizer, name, plain.unpack(data, placed=True))
    for name in now.keys() - packed.keys() - {*kept} if kept is not None else ():
        delattr(optimizer, name)


@cache
def _of_torch() -> frozenset[str]:
    """Return the names of attributes that torch gives to optimizers, those of schedulers included."""
    optimizer = SGD([nn.Parameter(torch.zeros(1))], lr=0.1)
    torch.optim.lr_scheduler.StepLR(optimizer, 1)
    return frozenset((*vars(optimizer), "zero_grad"))


def _are_parameters(value: Any) -> bool:
    """Return whether a value is a parameter, or a list of parameters, which the script has given to the optimizer."""
    if isinstance(value, (list, tuple)):
        return bool(value) and all(map(_are_parameters, value))
    return isinstance(value, nn.Parameter)


def _refers_to_parameters(value: Any) -> bool:
    if isinstance(value, Mapping):
        return any(map(_refers_to_parameters, (*value.keys(), *value.values())))
    if isinstance(value, (list, tuple)):
        return any(map(_refers_to_parameters, value))
    return isinstance(value, nn.Parameter)
