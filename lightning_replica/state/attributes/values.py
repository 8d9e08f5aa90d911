"""Values as they were: what a snapshot keeps of an attribute, and how the attribute is restored from it."""

import operator
import random
import weakref
from collections import deque
from dataclasses import dataclass
from typing import Any, Final, TypeAlias

import numpy as np
import torch
from torch import Tensor, nn

from lightning_replica._compat.torch import write_count
from lightning_replica.errors import RecoveryError
from lightning_replica.state.atoms import ATOMS, is_same_atom

LARGE_BYTES: Final = 4 * 2**20
MANY: Final = 1000  # items of a container; if it has more, the container is copied, but not what its items hold
DEEP: Final = 8  # containers in containers; deeper ones are not followed, because they may contain themselves
CONTAINERS: Final = (tuple, list, dict, set, deque)
GENERATORS: Final = (torch.Generator, random.Random, np.random.Generator, np.random.RandomState)

Kept: TypeAlias = Any
"""An atom, or one of the classes below."""


class KeptTensor:
    """A tensor as it was."""

    def __init__(self, tensor: Tensor, copied: bool) -> None:
        self._ref = weakref.ref(tensor)
        self._writes = write_count(tensor)
        self._registered = isinstance(tensor, (nn.Parameter, nn.Buffer))  # other code restores these
        has_graph = tensor.requires_grad and not tensor.is_leaf
        self._itself = None if has_graph else tensor
        self._content = tensor.detach().clone() if not self._registered and (copied or has_graph) else None
        self.nbytes = tensor.numel() * tensor.element_size()

    def is_of(self, tensor: Tensor, copied: bool) -> bool:
        """Return whether this is ``tensor`` as it is now, and has a copy of its content if that is to be ``copied``."""
        same = self._ref() is tensor and self._writes == write_count(tensor) != -1
        return same and (self._content is not None or not copied or self._registered)

    def put_back(self, name: str) -> Tensor:
        """Return the tensor itself with its former content, or a copy if it had a graph."""
        if self._itself is None:
            return self.tensor.clone()
        if self._registered or write_count(self._itself) == self._writes != -1:
            return self._itself
        if self._content is None:
            raise RecoveryError(
                f"{name!r} is a list of more than {LARGE_BYTES >> 20} MiB, and a tensor in it was written to in place:"
                " its former content is gone. Put a new tensor in its place, or keep it in a buffer."
            )
        with torch.no_grad():
            self._itself.copy_(self._content)
        self._writes = write_count(self._itself)
        return self._itself

    @property
    def tensor(self) -> Tensor:
        """The former content of the tensor, or the tensor itself if it was not copied."""
        tensor = self._itself if self._content is None else self._content
        if tensor is None:
            raise RuntimeError("A tensor with a graph was not copied.")
        return tensor


@dataclass(frozen=True)
class KeptContainer:
    """A list, deque, dict or set: the object itself, and its former items."""

    itself: Any
    items: list[Kept]
    keys: list[Any] | None = None

    def put_back(self, name: str) -> Any:
        """Return the container, filled with its former items."""
        fill(self.itself, [put_back_value(item, name) for item in self.items], self.keys)
        return self.itself


@dataclass(frozen=True)
class KeptTuple:
    """A tuple that holds something that can change."""

    itself: Any
    items: list[Kept]

    def put_back(self, name: str) -> Any:
        """Return a new tuple of the same class with the former items."""
        return tuple_like(self.itself, [put_back_value(item, name) for item in self.items])


@dataclass(frozen=True)
class KeptArray:
    """A NumPy array: the object itself, and its former content."""

    itself: "np.ndarray[Any, Any]"
    content: "np.ndarray[Any, Any]"

    def put_back(self, _: str) -> Any:
        """Return the array, with its former content."""
        if not _same_bits(self.itself, self.content):
            self.itself[...] = self.content
        return self.itself


@dataclass(frozen=True)
class KeptGenerator:
    """A random number generator: the object itself, and its former state."""

    itself: Any
    state: Any

    def put_back(self, _: str) -> Any:
        """Return the generator, in its former state."""
        set_random(self.itself, self.state)
        return self.itself


@dataclass(frozen=True)
class KeptObject:
    """Any other value, for example a large array: the object itself, without a copy of its content."""

    itself: Any

    def put_back(self, _: str) -> Any:
        """Return the object as it is now."""
        return self.itself


CLASSES: Final = (KeptTensor, KeptContainer, KeptTuple, KeptArray, KeptGenerator, KeptObject)


def put_back_value(kept: Kept, name: str) -> Any:
    """Restore a value and return it; ``name`` is the name of its attribute, for messages."""
    return kept.put_back(name) if isinstance(kept, CLASSES) else kept


def same(a: Kept, b: Kept) -> bool:
    """Return whether two values were the same; in doubt, return False."""
    if a is b:
        return True
    if type(a) is not type(b):
        return False
    if isinstance(a, (KeptContainer, KeptTuple)):
        if len(a.items) != len(b.items) or (isinstance(a, KeptContainer) and a.keys != b.keys):
            return False
        return all(map(operator.is_, a.items, b.items)) or (len(a.items) <= MANY and all(map(same, a.items, b.items)))
    if isinstance(a, KeptArray):
        return _same_bits(a.content, b.content)
    if isinstance(a, KeptObject):
        return a.itself is b.itself
    if isinstance(a, KeptGenerator):
        return _same_state(a.state, b.state)
    return type(a) in ATOMS and is_same_atom(a, b)


def fill(container: Any, items: list[Any], keys: list[Any] | None) -> None:
    """Replace the contents of a container."""
    if isinstance(container, list):
        container[:] = items
        return
    container.clear()
    if keys is None:
        (container.extend if isinstance(container, deque) else container.update)(items)
    else:
        container.update(dict(zip(keys, items, strict=True)))  # given pairs, a Counter would count them


def tuple_like(value: Any, items: list[Any]) -> Any:
    """Return a tuple of the class of ``value``, which may be a named tuple."""
    return type(value)(*items) if hasattr(value, "_fields") else type(value)(items)


def random_state(generator: Any) -> Any:
    """Return the state of one of `GENERATORS`."""
    if isinstance(generator, random.Random):
        return generator.getstate()
    return generator.bit_generator.state if isinstance(generator, np.random.Generator) else generator.get_state()


def set_random(generator: Any, state: Any) -> None:
    """Set one of `GENERATORS` to a former state."""
    if isinstance(generator, random.Random):
        generator.setstate(state)
    elif isinstance(generator, np.random.Generator):
        generator.bit_generator.state = state
    else:
        generator.set_state(state)


def _same_bits(a: "np.ndarray[Any, Any]", b: "np.ndarray[Any, Any]") -> bool:
    """Whether two arrays hold the same bits: 0.0 equals -0.0, but does not divide like it."""
    if (a.shape, a.dtype) != (b.shape, b.dtype) or a.dtype.hasobject:
        return np.array_equal(a, b)
    first, second = (np.ascontiguousarray(each).reshape(-1).view(np.uint8) for each in (a, b))
    return np.array_equal(first, second)


def _same_state(a: Any, b: Any) -> bool:
    if isinstance(a, Tensor):
        return torch.equal(a, b)
    if isinstance(a, np.ndarray):
        return np.array_equal(a, b)
    if isinstance(a, dict):
        return all(_same_state(value, b[key]) for key, value in a.items())
    return all(map(_same_state, a, b)) if isinstance(a, tuple) else bool(a == b)
