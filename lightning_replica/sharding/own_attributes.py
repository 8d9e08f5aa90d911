"""What an optimizer of the user's class keeps in attributes of its own, beside the state that torch knows of.

A counter that each update raises belongs to the shard: it follows the updates, and all holders of a shard have the
same. So it is sent with the shard, and goes back with it where a batch makes more than one update.

What code outside of updates writes to an optimizer belongs to the rank, as an attribute of the module does. `watched`
finds out which attributes updates change.
"""

import types
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from functools import cache
from itertools import islice
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from torch.optim import SGD, Optimizer

from lightning_replica._compat.torch import write_count
from lightning_replica.core import plain

_DEEP, _MANY = 4, 10_000  # objects in objects, and items of a container, that are looked at for changes
# Of torch's attributes, those that code may write to at any time: the last four hold hooks.
_WRITTEN = {
    "defaults",
    *(f"_optimizer_step_{when}_hooks" for when in ("pre", "post")),
    *(f"_optimizer_state_dict_{when}_hooks" for when in ("pre", "post")),
}
_of_updates: WeakKeyDictionary[Optimizer, set[str]] = WeakKeyDictionary()
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


@contextmanager
def watched(optimizer: Optimizer) -> Iterator[None]:
    """Note which attributes of an optimizer an update changes, in the block."""
    before = _marks(optimizer)
    yield
    after = _marks(optimizer)
    changed = {name for name in before.keys() | after.keys() if before.get(name) != after.get(name)}
    if changed:
        _of_updates.setdefault(optimizer, set()).update(changed)


def not_of_a_rank(optimizer: Optimizer) -> frozenset[str]:
    """Return the names of an optimizer's attributes that are torch's, or belong to the shard."""
    return (_of_torch() - _WRITTEN) | _of_updates.get(optimizer, set())


def _marks(optimizer: Optimizer) -> dict[str, Any]:
    return {name: _mark(value, 0) for name, value in vars(optimizer).items() if name not in _of_torch()}


def _mark(value: Any, depth: int) -> Any:
    """Return something that is another one after the value has changed, and takes no copy of large tensors."""
    if isinstance(value, Tensor):
        return id(value), None if value.is_inference() else write_count(value)
    if isinstance(value, (bool, int, float, str, bytes)):
        return type(value), value
    if depth < _DEEP and isinstance(value, (list, tuple)):
        return len(value), [_mark(each, depth + 1) for each in islice(value, _MANY)]
    if depth < _DEEP and isinstance(value, Mapping):
        return len(value), [(id(key), _mark(each, depth + 1)) for key, each in islice(value.items(), _MANY)]
    attributes = {} if isinstance(value, (type, types.ModuleType, *_FUNCTIONS)) else getattr(value, "__dict__", {})
    return id(value), [_mark(each, depth + 1) for each in attributes.values()] if depth < _DEEP else None


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
