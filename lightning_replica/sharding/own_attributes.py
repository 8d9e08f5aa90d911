"""What an optimizer of the user's class keeps in attributes of its own, beside the state that torch knows of.

A counter that each update raises belongs to the shard: it follows the updates, and all holders of a shard have the
same. So it is sent with the shard, and goes back with it where a batch makes more than one update.
"""

from collections.abc import Mapping
from functools import cache
from typing import Any

import torch
from torch import nn
from torch.optim import SGD, Optimizer

from lightning_replica.core import plain


def attributes_of(optimizer: Optimizer) -> tuple[dict[str, bytes], list[str]]:
    """Return what an optimizer's own attributes hold, packed, and the names of those that cannot be packed."""
    packed: dict[str, bytes] = {}
    left = []
    for name, value in vars(optimizer).items():
        if name in _of_torch() or callable(value) or _holds_parameters(value):
            continue
        try:
            packed[name] = plain.pack(value)
        except plain.NotPlainError:
            left.append(name)
    return packed, left


def set_attributes(optimizer: Optimizer, packed: Mapping[str, bytes]) -> None:
    """Give an optimizer the attributes that `attributes_of` has returned."""
    for name, data in packed.items():
        if plain.pack(getattr(optimizer, name, None)) != data:
            setattr(optimizer, name, plain.unpack(data, placed=True))


@cache
def _of_torch() -> frozenset[str]:
    """Return the names of attributes that torch gives to optimizers, those of schedulers included."""
    optimizer = SGD([nn.Parameter(torch.zeros(1))], lr=0.1)
    torch.optim.lr_scheduler.StepLR(optimizer, 1)
    return frozenset((*vars(optimizer), "zero_grad"))


def _holds_parameters(value: Any) -> bool:
    """Return whether a value refers to parameters, which the script has given to the optimizer."""
    if isinstance(value, Mapping):
        return any(map(_holds_parameters, (*value.keys(), *value.values())))
    return isinstance(value, nn.Parameter) or (isinstance(value, (list, tuple)) and any(map(_holds_parameters, value)))
