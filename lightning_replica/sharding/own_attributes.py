"""What an optimizer of the user's class keeps in attributes of its own, beside the state that torch knows of.

A counter that each update raises belongs to the shard: it follows the updates, and all holders of a shard have the
same. So it is sent with the shard, and goes back with it where a batch makes more than one update.

What code outside of updates writes to an optimizer belongs to the rank, as an attribute of the module does; also what
it writes to an object that the optimizer has, as SAM does to an optimizer inside of it. `Watch` finds out which
attributes these are.
"""

import random
import types
from collections import deque
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import cache
from itertools import islice
from typing import Any, Final, NamedTuple, TypeVar
from weakref import WeakValueDictionary

import numpy as np
import torch
from torch import Tensor, nn
from torch.optim import SGD, Optimizer

from lightning_replica._compat.torch import write_count
from lightning_replica.core import plain

_DEEP = 4  # objects in objects that are looked at for changes
_MANY, _MANY_IN_OBJECTS = 10_000, 200  # items that are looked at, of all attributes; and of what one object leads to
_BYTES = 2**16  # of an array that is compared
# Of torch's attributes, those that code may write to at any time: the last four hold hooks.
_WRITTEN = {
    "defaults",
    *(f"_optimizer_step_{when}_hooks" for when in ("pre", "post")),
    *(f"_optimizer_state_dict_{when}_hooks" for when in ("pre", "post")),
}
_SCALARS = (bool, int, float, str, bytes)
_FUNCTIONS = (types.FunctionType, types.MethodType, types.BuiltinFunctionType)
_T = TypeVar("_T")
_NOT_LOOKED_INTO = (type, types.ModuleType, *_FUNCTIONS)


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
    found, watch = OwnAttributes({}, []), watch_of(optimizer)
    known = _parameters_of(optimizer) if watch is None else watch.parameters
    for name, value in vars(optimizer).items():
        if name in _of_torch() or isinstance(value, _FUNCTIONS) or _are_parameters(value, known):
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
    of_rank = set[str]() if watch is None else watch.of_rank_by_now
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

    Attributes:
        parameters: The ``id`` of its parameters, and of the pieces that it has in updates.
    """

    def __init__(self, optimizer: Optimizer) -> None:
        self._optimizer = optimizer  # and so no other object has its `id`
        self.parameters = _parameters_of(optimizer)
        self._outside, self._inside, self._reported = set[str](), set[str](), set[str]()
        self._cut = set[str]()
        self._updates = self._looked_at = 0
        self._left = self._marks()
        _watches[id(optimizer)] = self

    @contextmanager
    def update(self) -> Iterator[None]:
        """Note what has been written since the last update, and what this one writes, in the block."""
        self._outside |= self.new
        before = self._marks()
        try:
            yield
        finally:
            self.settle()
            self._inside |= _differences(before, self._left)
            self._updates += 1

    def settle(self) -> None:
        """Count what the attributes hold now as left by an update."""
        self._left = self._marks()

    def add(self, names: Iterable[str]) -> None:
        """Count attributes as written outside of updates, as in the rank whose place this one takes."""
        self._outside.update(names)

    def of_rank(self) -> tuple[str, ...]:
        """Return the names of what code outside of updates has written. Not called in the middle of an update."""
        self._outside |= self.new
        return tuple(sorted(self._without_updates(self._outside)))

    @property
    def of_rank_by_now(self) -> set[str]:
        """What `of_rank` would return; but to ask for this notes nothing."""
        return self._without_updates(self._outside | self.new)

    def _without_updates(self, outside: set[str]) -> set[str]:
        return (outside - self._inside) | _WRITTEN

    def lost(self) -> list[str]:
        """Return what updates have written and what is no plain data, so that it is neither sent nor saved; each once.

        Called after each update. An attribute that was plain data may hold something else later: so all are looked at
        again, more and more seldom.
        """
        is_due = len(self._inside) > self._looked_at or (self._inside and self._updates & (self._updates - 1) == 0)
        if not is_due:
            return []
        self._looked_at = len(self._inside)
        found = [name for name in attributes_of(self._optimizer).left if name in self._inside - self._reported]
        self._reported.update(found)
        return found

    def unseen(self) -> list[str]:
        """Return attributes of which not all was looked at, and which were not seen to change; each once."""
        found = sorted(self._cut - self._inside - self._outside - self._reported)
        self._reported.update(found)
        return found

    @property
    def of_both(self) -> set[str]:
        """The names of what both updates and other code have written, which counts as the updates'."""
        return self._outside & self._inside

    @property
    def new(self) -> set[str]:
        """The names of what has been written outside of updates since the last one, and not before."""
        return _differences(self._left, self._marks()) - self._outside

    def _marks(self) -> dict[str, Any]:
        optimizer, of_torch = self._optimizer, _of_torch()
        own = [(name, value) for name, value in vars(optimizer).items() if name not in of_torch]
        if all(type(value) in _SCALARS for _, value in own):  # as in torch's own optimizers
            return {name: (type(value), value) for name, value in own}
        self.parameters |= _parameters_of(optimizer)  # whole ones, and pieces
        groups = optimizer.param_groups
        others = {id(each) for each in (optimizer, optimizer.state, groups, *groups)} | self.parameters
        looks, found = _Looks(_MANY, others), dict[str, Any]()
        for name, value in own:
            looks.is_cut = False
            found[name] = _mark(value, 0, looks)
            if looks.is_cut:
                self._cut.add(name)
        return found


_watches: WeakValueDictionary[int, Watch] = WeakValueDictionary()


def watch_of(optimizer: Optimizer) -> Watch | None:
    """Return the watch of an optimizer; None if it is not sharded."""
    return _watches.get(id(optimizer))


def _differences(one: Mapping[str, Any], other: Mapping[str, Any]) -> set[str]:
    return {name for name in one.keys() | other.keys() if one.get(name) != other.get(name)}


def _parameters_of(optimizer: Optimizer) -> set[int]:
    return {id(each) for group in optimizer.param_groups for each in group["params"]}


@dataclass
class _Looks:
    """How far attributes are looked at.

    Attributes:
        left: How many items are still looked at.
        others: The ``id`` of those objects that are none of an attribute's.
        is_cut: Whether there were more items.
    """

    left: int
    others: Collection[int]
    is_cut: bool = False

    def up_to(self, items: Iterable[_T]) -> list[_T]:
        """Return as many items as are still looked at."""
        found = [*islice(items, max(self.left, 0) + 1)]
        self.is_cut |= len(found) > self.left
        found = found[: max(self.left, 0)]
        self.left -= len(found)
        return found


def _mark(value: Any, depth: int, looks: _Looks) -> Any:
    """Return something that is another one after the value has changed, and takes no copy of large tensors.

    What it does not see counts as written by updates. So do values of the optimizer's parameters.

    Args:
        value: The value.
        depth: In how many objects it lies.
        looks: What is looked at.
    """
    cls = type(value)  # not by `isinstance`, which asks a proxy for what it stands for
    if id(value) in looks.others:
        return id(value)
    if issubclass(cls, Tensor):
        return id(value), None if value.is_inference() else write_count(value)
    if issubclass(cls, _SCALARS):
        return cls, value
    for classes, of_value in _OF_CLASSES:
        if issubclass(cls, classes):
            return id(value), of_value(value)
    if depth == _DEEP:
        return id(value)
    if cls in (list, tuple, deque):
        return len(value), [_mark(each, depth + 1, looks) for each in looks.up_to(value)]
    if issubclass(cls, dict):
        return len(value), [(id(key), _mark(each, depth + 1, looks)) for key, each in looks.up_to(dict.items(value))]
    inner = _Looks(min(looks.left, _MANY_IN_OBJECTS), looks.others)
    within = _tensors_in(value, looks.others) if issubclass(cls, nn.Module) else _attributes_in(value)
    found = [(name, _mark(each, depth + 1, inner)) for name, each in inner.up_to(within)]
    looks.is_cut |= inner.is_cut
    return id(value), found


def _attributes_in(value: Any) -> Iterator[tuple[str, Any]]:
    """Yield attributes and slots of an object, without calling code of its class; none of code's."""
    cls = type(value)
    if issubclass(cls, _NOT_LOOKED_INTO):
        return
    with suppress(AttributeError):
        yield from [*object.__getattribute__(value, "__dict__").items()]
    for name, slot in ((name, each) for base in cls.__mro__ for name, each in vars(base).items()):
        if isinstance(slot, types.MemberDescriptorType):
            with suppress(AttributeError):
                yield name, slot.__get__(value)


def _tensors_in(module: nn.Module, others: Collection[int]) -> Iterator[tuple[str, Any]]:
    """Yield parameters and buffers of a module; none of the model that the optimizer trains."""
    first = next(nn.Module.parameters(module), None)
    if first is None or id(first) not in others:
        yield from nn.Module.named_parameters(module)
        yield from nn.Module.named_buffers(module)


def _bits_of(array: Any) -> Any:
    return array.tobytes() if array.nbytes <= _BYTES and array.dtype != object else None


_OF_CLASSES: Final[tuple[tuple[Any, Callable[[Any], Any]], ...]] = (
    (np.ndarray, _bits_of),
    (bytearray, bytes),
    ((set, frozenset), lambda value: frozenset(map(id, value)) if len(value) <= _MANY_IN_OBJECTS else len(value)),
    (torch.Generator, lambda value: bytes(value.get_state().numpy())),
    (random.Random, lambda value: value.getstate()),
    (np.random.Generator, lambda value: repr(value.bit_generator.state)),
    (np.random.RandomState, lambda value: repr(value.get_state())),
)


@cache
def _of_torch() -> frozenset[str]:
    """Return the names of attributes that torch gives to optimizers, those of schedulers included."""
    optimizer = SGD([nn.Parameter(torch.zeros(1))], lr=0.1)
    torch.optim.lr_scheduler.StepLR(optimizer, 1)
    return frozenset((*vars(optimizer), "zero_grad"))


def _are_parameters(value: Any, known: Collection[int]) -> bool:
    """Return whether a value is one of the parameters ``known`` by their ``id``, or a list of such."""
    if isinstance(value, (list, tuple)):
        return bool(value) and all(_are_parameters(each, known) for each in value)
    return id(value) in known


def _refers_to_parameters(value: Any) -> bool:
    if isinstance(value, Mapping):
        return any(map(_refers_to_parameters, (*value.keys(), *value.values())))
    if isinstance(value, (list, tuple)):
        return any(map(_refers_to_parameters, value))
    return isinstance(value, nn.Parameter)
