"""Plain attributes of modules: counters, flags, hidden states, lists in which outputs are collected for an epoch's end.

A rank that goes back a step puts them back, so that a batch that is done again finds them as it did the first time: in
the LightningModule and in all submodules, but for those of torch's own classes, which keep nothing but settings there.
State are numbers, strings, None, tensors, arrays, generators and containers of these; other objects are left alone.

What belongs to one rank is mirrored to its peers, for its replacement: the hidden state of a recurrent network is
another on every rank. Sent is what has changed since training began. Of a large attribute (`_LARGE_BYTES`, `_MANY`),
mostly a list that grows for an epoch, nothing is mirrored, as that would take time in every step: a replacement has a
peer's. Large arrays of NumPy are data, and left alone.

A tensor with a graph comes back without it. A graph that leads from one step into the next is not put back.
"""

import operator
import random
import weakref
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, TypeAlias

import lightning.pytorch as pl
import numpy as np
import torch
from torch import Tensor, nn
from torchmetrics import Metric

from lightning_replica import plain
from lightning_replica.devices.host import HOST
from lightning_replica.errors import RecoveryError

_OWN = frozenset(vars(pl.LightningModule()))
_ATOMS = frozenset((type(None), bool, int, float, str, bytes))
_LARGE_BYTES = 4 * 2**20
_LARGE_ARRAY_BYTES = 2**18  # arrays do not say whether they were written to: they are copied in every snapshot
_MANY = 1000  # items of a container; with more, it is copied without what they consist of
_DEEP = 8  # containers in containers; below, they may contain themselves

Kept: TypeAlias = Any
"""An atom, or one of the classes below."""


class _Tensor:
    """A tensor, as it was."""

    def __init__(self, tensor: Tensor, copied: bool) -> None:
        self._ref = weakref.ref(tensor)
        self._version = _version(tensor)
        registered = isinstance(tensor, (nn.Parameter, nn.Buffer))  # put back by others
        self._has_graph = tensor.requires_grad and not tensor.is_leaf
        self._itself = None if self._has_graph else tensor
        self.content = tensor.detach().clone() if not registered and (copied or self._has_graph) else None
        self.nbytes = tensor.numel() * tensor.element_size()

    def is_of(self, tensor: Tensor, copied: bool) -> bool:
        """Whether this is ``tensor`` as it is now."""
        same = self._ref() is tensor and self._version == _version(tensor) != -1
        return same and (self.content is not None or not copied or isinstance(tensor, (nn.Parameter, nn.Buffer)))

    def put_back(self, name: str) -> Tensor:
        """The tensor itself, with what it held; or a copy, where it had a graph."""
        if self._itself is None:
            assert self.content is not None
            return self.content.clone()
        if isinstance(self._itself, (nn.Parameter, nn.Buffer)) or _version(self._itself) == self._version != -1:
            return self._itself
        if self.content is None:
            raise RecoveryError(
                f"{name!r} is a list of more than {_LARGE_BYTES >> 20} MiB, and a tensor in it was written to in place:"
                " what it held before is gone. Put a new tensor in its place, or keep it in a buffer."
            )
        with torch.no_grad():
            self._itself.copy_(self.content)
        self._version = _version(self._itself)
        return self._itself

    def plain(self) -> list[Any]:
        """For another rank: whether it lies on the host, and the contents."""
        tensor = self._itself if self.content is None else self.content
        assert tensor is not None
        return ["tensor", tensor.device == HOST, tensor.detach()]


@dataclass(frozen=True)
class _Filled:
    """A list, deque, dict or set: the object itself, and what was in it."""

    itself: Any
    items: list[Kept]
    keys: list[Any] | None = None

    def put_back(self, name: str) -> Any:
        _fill(self.itself, [_put_back(item, name) for item in self.items], self.keys)
        return self.itself


@dataclass(frozen=True)
class _Tuple:
    """A tuple with something in it that can change."""

    itself: Any
    items: list[Kept]

    def put_back(self, name: str) -> Any:
        return _tuple_like(self.itself, [_put_back(item, name) for item in self.items])


@dataclass(frozen=True)
class _Array:
    """An array of NumPy."""

    itself: "np.ndarray[Any, Any]"
    content: "np.ndarray[Any, Any]"

    def put_back(self, _: str) -> Any:
        if not np.array_equal(self.itself, self.content):
            self.itself[...] = self.content
        return self.itself


@dataclass(frozen=True)
class _Generator:
    """A source of random numbers."""

    itself: Any
    state: Any

    def put_back(self, _: str) -> Any:
        _set_random(self.itself, self.state)
        return self.itself


@dataclass(frozen=True)
class _Other:
    """Anything else inside of a container: the object itself, whatever has become of it."""

    itself: Any

    def put_back(self, _: str) -> Any:
        return self.itself


_CLASSES = (_Tensor, _Filled, _Tuple, _Array, _Generator, _Other)


@dataclass
class Taken:
    """The attributes of a module's tree, at one point.

    Attributes:
        values: By number of the submodule, by name.
        changed: Which of them are not as they were when training began.
    """

    values: dict[int, dict[str, Kept]] = field(default_factory=dict)
    changed: dict[int, dict[str, Kept]] = field(default_factory=dict)

    def private(self) -> list[Any]:
        """What is mirrored, as plain data."""
        return _plain(self.changed, _LARGE_BYTES)

    def whole(self) -> list[Any]:
        """All that may travel to another rank, as plain data."""
        return _plain(self.values, None)


class Copies:
    """Copies of tensors, kept from one snapshot to the next, and what attributes were when training began.

    Args:
        module: The LightningModule, before training and before its sanity check, which a replacement does not run.
    """

    def __init__(self, module: pl.LightningModule) -> None:
        self._tensors: dict[int, _Tensor] = {}
        self._first: dict[int, dict[str, Kept]] = {}
        first = self.take(list(module.modules())).values
        if type(module).on_load_checkpoint is not pl.LightningModule.on_load_checkpoint:
            first.pop(0, None)  # a replacement loads no checkpoint: it is sent all of them
        self._first = first

    def take(self, modules: Sequence[nn.Module]) -> Taken:
        """Copies what ``modules`` have now."""
        former, self._tensors = self._tensors, {}
        taken = Taken()
        for number, module in enumerate(modules):
            if number and _keeps_nothing(module):
                continue
            values: dict[str, Kept] = {}
            for name, value in vars(module).items():
                if name not in _OWN and (type(value) in _ATOMS or is_state(value)):
                    values[name] = value if type(value) in _ATOMS else self._keep(value, former, not _is_large(value))
            taken.values[number] = values
            first = self._first.get(number, {})
            changed = {n: kept for n, kept in values.items() if n not in first or not _same(kept, first[n])}
            if changed:
                taken.changed[number] = changed
        return taken

    def _keep(self, value: Any, former: dict[int, _Tensor], copied: bool, depth: int = 0) -> Kept:
        kind = type(value)
        if kind in _ATOMS:
            return value
        if isinstance(value, Tensor):
            kept = self._tensors.get(id(value)) or former.get(id(value))
            if kept is None or not kept.is_of(value, copied):
                kept = _Tensor(value, copied)
            self._tensors[id(value)] = kept
            return kept
        if isinstance(value, (tuple, dict, set, list, deque)) and depth < _DEEP:
            return self._keep_container(value, former, copied, depth + 1)
        if isinstance(value, np.ndarray) and value.nbytes <= _LARGE_ARRAY_BYTES:
            return _Array(value, value.copy())
        state = _random_state(value)
        return _Other(value) if state is None else _Generator(value, state)

    def _keep_container(self, value: Any, former: dict[int, _Tensor], copied: bool, depth: int) -> Kept:
        items = list(value.values() if isinstance(value, dict) else value)
        if len(items) <= _MANY:
            items = [self._keep(item, former, copied, depth) for item in items]
        if isinstance(value, tuple):
            return value if all(map(operator.is_, items, value)) else _Tuple(value, items)
        return _Filled(value, items, list(value) if isinstance(value, dict) else None)


def put(modules: Sequence[nn.Module], taken: Taken) -> None:
    """Puts back what this rank itself has taken; what has come into being since goes."""
    for number, saved in taken.values.items():
        now = vars(modules[number])
        for name in [name for name, value in now.items() if name not in saved and name not in _OWN and is_state(value)]:
            del now[name]
        for name, kept in saved.items():
            if not _is_registered(modules[number], name):
                now[name] = _put_back(kept, name)


def put_plain(modules: Sequence[nn.Module], sent: list[Any], device: torch.device) -> None:
    """Puts what another rank has sent into a replacement; containers that are there already are filled."""
    for number, values in sent:
        now = vars(modules[number])
        for name, value in values:
            if _is_registered(modules[number], name):
                continue  # the module has made a parameter, a buffer or a submodule of what was an attribute
            now[name] = _from_plain(value, now.get(name), device)


def is_state(value: Any) -> bool:
    """Whether an attribute is state; other objects are not known well enough to be put back."""
    if type(value) in _ATOMS or isinstance(value, (list, tuple, dict, set, deque, np.ndarray)):
        return True
    return isinstance(value, Tensor) or _random_state(value) is not None


def _keeps_nothing(module: nn.Module) -> bool:
    """Whether attributes are settings only: torch's own, unless a hook makes weights of it, as pruning does."""
    if isinstance(module, Metric):
        return True  # metrics.py
    return type(module).__module__.startswith("torch.") and not module._forward_pre_hooks


def _is_registered(module: nn.Module, name: str) -> bool:
    return name in module._parameters or name in module._buffers or name in module._modules


def _put_back(kept: Kept, name: str) -> Any:
    return kept.put_back(name) if isinstance(kept, _CLASSES) else kept


def _same(a: Kept, b: Kept) -> bool:
    if a is b:
        return True
    if type(a) is not type(b):
        return False
    if isinstance(a, (_Filled, _Tuple)):
        if len(a.items) != len(b.items) or (isinstance(a, _Filled) and a.keys != b.keys):
            return False
        return all(map(operator.is_, a.items, b.items)) or (len(a.items) <= _MANY and all(map(_same, a.items, b.items)))
    if isinstance(a, _Array):
        return np.array_equal(a.content, b.content)
    if isinstance(a, _Other):
        return a.itself is b.itself
    if isinstance(a, _Generator):
        return _to_plain_bytes(a) == _to_plain_bytes(b)
    return type(a) in _ATOMS and a == b


def _version(tensor: Tensor) -> int:
    return -1 if tensor.is_inference() else tensor._version


def _is_large(value: Any) -> bool:
    if not isinstance(value, (list, deque)):
        return False
    return sum(item.numel() * item.element_size() for item in value if isinstance(item, Tensor)) > _LARGE_BYTES


def _fill(container: Any, items: list[Any], keys: list[Any] | None) -> None:
    if isinstance(container, list):
        container[:] = items
        return
    container.clear()
    if keys is None:
        (container.extend if isinstance(container, deque) else container.update)(items)
    else:
        container.update(dict(zip(keys, items, strict=True)))  # a Counter would count pairs


def _tuple_like(value: Any, items: list[Any]) -> Any:
    return type(value)(*items) if hasattr(value, "_fields") else type(value)(items)


def _random_state(value: Any) -> Any:
    if isinstance(value, torch.Generator):
        return value.get_state()
    if isinstance(value, random.Random):
        return value.getstate()
    if isinstance(value, np.random.Generator):
        return value.bit_generator.state
    return value.get_state() if isinstance(value, np.random.RandomState) else None


def _set_random(generator: Any, state: Any) -> None:
    if isinstance(generator, torch.Generator):
        generator.set_state(state)
    elif isinstance(generator, random.Random):
        generator.setstate(state)
    elif isinstance(generator, np.random.Generator):
        generator.bit_generator.state = state
    else:
        generator.set_state(state)


# Travelling


def _plain(values: dict[int, dict[str, Kept]], limit: int | None) -> list[Any]:
    sent: list[Any] = []
    for number, attributes in values.items():
        known = []
        for name, kept in attributes.items():
            try:
                if limit is None or (_nbytes(kept) <= limit and _count(kept) <= _MANY):
                    known.append([name, _to_plain(kept)])
            except plain.NotPlainError:
                continue  # a replacement leaves it as it has built it
        if known:
            sent.append([number, known])
    return sent


def _nbytes(kept: Kept) -> int:
    if isinstance(kept, _Tensor):
        return kept.nbytes
    if isinstance(kept, (_Filled, _Tuple)):
        return sum(map(_nbytes, kept.items))
    if isinstance(kept, Tensor):
        return kept.numel() * kept.element_size()
    return kept.content.nbytes if isinstance(kept, _Array) else 0


def _count(kept: Kept) -> int:
    if not isinstance(kept, (_Filled, _Tuple)):
        return 1
    return len(kept.items) if len(kept.items) > _MANY else 1 + sum(map(_count, kept.items))


def _to_plain(kept: Kept) -> Any:
    if type(kept) in _ATOMS:
        return kept
    if isinstance(kept, Tensor):
        return ["tensor", kept.device == HOST, kept.detach()]
    if isinstance(kept, _Tensor):
        return kept.plain()
    if isinstance(kept, tuple):
        return ["tuple", [_to_plain(item) for item in kept]]
    if isinstance(kept, _Tuple):
        return ["tuple", [_to_plain(item) for item in kept.items]]
    if isinstance(kept, _Filled):
        items = [_to_plain(item) for item in kept.items]
        if kept.keys is not None:
            return ["dict", items, [_to_plain(key) for key in kept.keys]]
        kind = "list" if isinstance(kept.itself, list) else "deque" if isinstance(kept.itself, deque) else "set"
        return [kind, items, kept.itself.maxlen] if kind == "deque" else [kind, items]
    if isinstance(kept, _Array) and kept.content.dtype.kind in "biufc":
        return ["array", torch.from_numpy(kept.content)]
    if isinstance(kept, _Generator):
        return ["random", _to_plain_state(kept.state)]
    raise plain.NotPlainError(f"it holds a {type(getattr(kept, 'itself', kept)).__qualname__}")


def _to_plain_bytes(kept: Kept) -> bytes:
    return plain.pack(_to_plain(kept))


def _to_plain_state(state: Any) -> Any:
    if isinstance(state, (tuple, list)):
        return ["tuple", [_to_plain_state(item) for item in state]]
    if isinstance(state, dict):
        return ["dict", [_to_plain_state(item) for item in state.values()], list(state)]
    if isinstance(state, np.ndarray):
        return ["array", torch.from_numpy(state.copy())]
    return ["tensor", True, state] if isinstance(state, Tensor) else state


def _from_plain(sent: Any, current: Any, device: torch.device) -> Any:
    """What was sent, in the container that is there if that is of its kind."""
    if not isinstance(sent, list):
        return sent
    kind, content, *more = sent
    if kind == "tensor":
        return more[0] if content else more[0].to(device)
    if kind == "array":
        return content.numpy()
    if kind == "random":
        if _random_state(current) is not None:
            _set_random(current, _from_plain(content, None, device))
        return current
    if kind == "dict":
        keys = [_from_plain(key, None, device) for key in more[0]]
        filled: dict[Any, Any] = current if isinstance(current, dict) else {}
        known = dict(filled)
        _fill(
            filled, [_from_plain(item, known.get(key), device) for key, item in zip(keys, content, strict=True)], keys
        )
        return filled
    items = [_from_plain(item, None, device) for item in content]
    if kind == "tuple":
        fits = isinstance(current, tuple) and len(current) == len(items)
        return _tuple_like(current, items) if fits else tuple(items)
    made: Any = [] if kind == "list" else set() if kind == "set" else deque(maxlen=more[0])
    container = current if isinstance(current, type(made)) else made
    _fill(container, items, None)
    return container
