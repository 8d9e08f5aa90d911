"""What an optimizer of the user's class keeps in attributes of its own, beside the state that torch knows of.

A counter that each update raises belongs to the shard: it follows the updates, and all holders of a shard have the
same. So it is sent with the shard, and goes back with it where a batch makes more than one update.

What code outside of updates writes to an optimizer belongs to the rank, as an attribute of the module does; also what
it writes to an object that the optimizer has, as SAM does to an optimizer inside of it. `Watch` finds out which
attributes these are.
"""

import types
from collections.abc import Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from itertools import islice
from typing import Any, NamedTuple
from weakref import WeakValueDictionary

import torch
from torch import Tensor, nn
from torch.optim import SGD, Optimizer

from lightning_replica._compat.torch import write_count
from lightning_replica.core import plain

_DEEP, _MANY = 4, 10_000  # objects in objects, and how many in all, that are looked at for changes
# Of torch's attributes, those that code may write to at any time: the last four hold hooks.
_WRITTEN = {
    "defaults",
    *(f"_optimizer_step_{when}_hooks" for when in ("pre", "post")),
    *(f"_optimizer_state_dict_{when}_hooks" for when in ("pre", "post")),
}
_FUNCTIONS = (types.FunctionType, types.MethodType, types.BuiltinFunctionType)
_NOT_LOOKED_INTO = (nn.Module, type, types.ModuleType, *_FUNCTIONS)


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


def attributes_of_shard(optimizer: Optimizer) -> OwnAttributes:
    """Return what `attributes_of` returns, without the names of those that belong to the rank."""
    found, watch = attributes_of(optimizer), watch_of(optimizer)
    of_rank = () if watch is None else watch.of_rank()
    return found._replace(left=[name for name in found.left if name not in of_rank])


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
    watch = watch_of(optimizer)
    if watch is not None:
        watch.settle()


class Watch:
    """Finds out which attributes of an optimizer code outside of updates writes. Updates own all others.

    Attributes of a rank go back with its snapshots. The snapshot of the tail is taken before the update, so what the
    update changes must not be among them.

    Args:
        optimizer: The optimizer, before its first update.
    """

    def __init__(self, optimizer: Optimizer) -> None:
        self._optimizer = optimizer  # and so no other object has its `id`
        self._left = _marks(optimizer)
        self._outside, self._inside = set[str](), set[str]()
        self._told = set[str]()
        _watches[id(optimizer)] = self

    @contextmanager
    def update(self) -> Iterator[None]:
        """Note what has been written since the last update, and what this one writes, in the block."""
        self._outside |= self.new
        before = _marks(self._optimizer)
        try:
            yield
        finally:
            self.settle()
            self._inside |= _differences(before, self._left)

    def settle(self) -> None:
        """Count what the attributes hold now as left by an update."""
        self._left = _marks(self._optimizer)

    def add(self, names: Iterable[str]) -> None:
        """Count attributes as written outside of updates, as in the rank whose place this one takes."""
        self._outside.update(names)

    def of_rank(self) -> tuple[str, ...]:
        """Return the names of what code outside of updates has written. Not called in the middle of an update."""
        self._outside |= self.new
        return tuple(sorted((self._outside - self._inside) | _WRITTEN))

    def lost(self) -> list[str]:
        """Return what updates have written and what is no plain data, so that it is neither sent nor saved; once."""
        if self._inside <= self._told:
            return []
        new, self._told = self._inside - self._told, set(self._inside)
        return [name for name in attributes_of(self._optimizer).left if name in new]

    @property
    def of_both(self) -> set[str]:
        """The names of what both updates and other code have written, which counts as the updates'."""
        return self._outside & self._inside

    @property
    def new(self) -> set[str]:
        """The names of what has been written outside of updates since the last one, and not before."""
        return _differences(self._left, _marks(self._optimizer)) - self._outside


_watches: WeakValueDictionary[int, Watch] = WeakValueDictionary()


def watch_of(optimizer: Optimizer) -> Watch | None:
    """Return the watch of an optimizer; None if it is not sharded."""
    return _watches.get(id(optimizer))


def _differences(one: Mapping[str, Any], other: Mapping[str, Any]) -> set[str]:
    return {name for name in one.keys() | other.keys() if one.get(name) != other.get(name)}


def _marks(optimizer: Optimizer) -> dict[str, Any]:
    groups = optimizer.param_groups
    looks = _Looks(_MANY, frozenset(map(id, (optimizer, optimizer.state, groups, *groups))))
    return {name: _mark(value, 0, looks) for name, value in vars(optimizer).items() if name not in _of_torch()}


@dataclass
class _Looks:
    """How many objects are still looked at, and the ``id`` of those that are none of an attribute's."""

    left: int
    others: frozenset[int]


def _mark(value: Any, depth: int, looks: _Looks) -> Any:
    """Return something that is another one after the value has changed, and takes no copy of large tensors.

    What it does not see counts as written by updates. So do values of parameters, which belong to no attribute.

    Args:
        value: The value.
        depth: In how many objects it lies.
        looks: What is looked at.
    """
    cls = type(value)  # not by `isinstance`, which asks a proxy for what it stands for
    if issubclass(cls, nn.Parameter):
        return id(value)
    if issubclass(cls, Tensor):
        return id(value), None if value.is_inference() else write_count(value)
    if issubclass(cls, (bool, int, float, str, bytes)):
        return cls, value
    looks.left -= 1
    if depth == _DEEP or looks.left < 0 or id(value) in looks.others:
        return id(value)
    if cls in (list, tuple):
        return len(value), [_mark(each, depth + 1, looks) for each in islice(value, _MANY)]
    if issubclass(cls, dict):
        return len(value), [(id(key), _mark(each, depth + 1, looks)) for key, each in islice(dict.items(value), _MANY)]
    return id(value), [(name, _mark(each, depth + 1, looks)) for name, each in _attributes_in(value)]


def _attributes_in(value: Any) -> list[tuple[str, Any]]:
    """Return the attributes of an object, without calling code of its class; none of a model's, or of code's."""
    if issubclass(type(value), _NOT_LOOKED_INTO):
        return []
    try:
        return [*object.__getattribute__(value, "__dict__").items()]
    except AttributeError:
        return []


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
