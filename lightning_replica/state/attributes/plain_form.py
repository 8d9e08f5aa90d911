"""Turns values into plain data for another process, and back.

Atoms and tensors stay as they are. Every other value becomes a list that begins with the name of its kind.
"""

import random
from collections import deque
from collections.abc import Sequence
from itertools import zip_longest
from typing import Any

import numpy as np
import torch
from torch import Tensor

from lightning_replica.core import plain
from lightning_replica.devices.host import HOST
from lightning_replica.state.atoms import ATOMS
from lightning_replica.state.attributes.values import (
    CONTAINERS,
    DEEP,
    GENERATORS,
    MANY,
    Kept,
    KeptArray,
    KeptContainer,
    KeptGenerator,
    KeptObject,
    KeptTensor,
    KeptTuple,
    fill,
    random_state,
    set_random,
    tuple_like,
)

_OF_RANDOM_STATE = 5  # items in the state of a `np.random.RandomState`; that of a `random.Random` has 3


def plain_values(values: dict[int, dict[str, Kept]], limit: int | None) -> list[Any]:
    """Return plain data for all values that can be sent.

    If there is a ``limit``, values that take more bytes or hold more than `MANY` items are left out.
    """
    sent: list[Any] = []
    for number, attributes in values.items():
        known = []
        for name, kept in attributes.items():
            try:
                if limit is None or (_nbytes(kept) <= limit and _count(kept) <= MANY):
                    known.append([name, kept_to_plain(kept)])
            except plain.NotPlainError:
                continue  # a replacement keeps the value that its script has made
        if known:
            sent.append([number, known])
    return sent


def _nbytes(kept: Kept) -> int:
    if isinstance(kept, KeptTensor):
        return kept.nbytes
    if isinstance(kept, (KeptContainer, KeptTuple)):
        return sum(map(_nbytes, kept.items))
    if isinstance(kept, Tensor):
        return kept.numel() * kept.element_size()
    return kept.content.nbytes if isinstance(kept, KeptArray) else 0


def _count(kept: Kept) -> int:
    if not isinstance(kept, (KeptContainer, KeptTuple)):
        return 1
    return len(kept.items) if len(kept.items) > MANY else 1 + sum(map(_count, kept.items))


def kept_to_plain(kept: Kept) -> Any:
    """Return plain data for a value as it was.

    Raises:
        NotPlainError: If the value holds something of an unknown kind.
    """
    if isinstance(kept, KeptTensor):
        return to_plain(kept.tensor)
    if isinstance(kept, KeptArray):
        return to_plain(kept.content)
    if isinstance(kept, KeptGenerator):
        return ["random", to_plain(kept.state)]
    if isinstance(kept, KeptTuple):
        return _container(kept.itself, [kept_to_plain(item) for item in kept.items])
    if isinstance(kept, KeptContainer):
        return _container(kept.itself, [kept_to_plain(item) for item in kept.items], kept.keys)
    return to_plain(kept.itself if isinstance(kept, KeptObject) else kept)


def to_plain(value: Any, depth: int = 0) -> Any:
    """Return plain data for a value as it is now; `from_plain` is the inverse.

    Args:
        value: The value.
        depth: How many containers the value is in.

    Raises:
        NotPlainError: If the value holds something of an unknown kind, or containers in more than `DEEP` containers.
    """
    if type(value) in ATOMS:
        return value
    if isinstance(value, Tensor) and plain.is_plain(value):
        return value.detach()
    if isinstance(value, np.ndarray) and value.dtype.kind in "biufc":
        return ["array", torch.from_numpy(value.copy())]
    if isinstance(value, GENERATORS):
        return ["random", to_plain(random_state(value), depth)]
    if isinstance(value, CONTAINERS) and depth < DEEP:
        keys, items = (list(value), value.values()) if isinstance(value, dict) else (None, value)
        return _container(value, [to_plain(item, depth + 1) for item in items], keys)
    raise plain.NotPlainError(f"it holds a {type(value).__module__}.{type(value).__qualname__}")


def _container(container: Any, sent: list[Any], keys: Sequence[Any] | None = None) -> list[Any]:
    if keys is not None:
        return ["dict", sent, [to_plain(key) for key in keys]]
    if isinstance(container, deque):
        return ["deque", sent, container.maxlen]
    return ["tuple" if isinstance(container, tuple) else "list" if isinstance(container, list) else "set", sent]


def from_plain(sent: Any, current: Any = None) -> Any:
    """Return the value that was sent, put into ``current`` if that is of the same kind and can change."""
    if not isinstance(sent, list):
        return sent
    kind, content, *more = sent
    if kind == "array":
        array = content.numpy()
        if isinstance(current, np.ndarray) and (current.shape, current.dtype) == (array.shape, array.dtype):
            current[...] = array
            return current
        return array
    if kind == "random":
        return _generator(from_plain(content), current)
    if kind == "dict":
        keys = [from_plain(key) for key in more[0]]
        filled: dict[Any, Any] = current if isinstance(current, dict) else {}
        known = dict(filled)
        fill(filled, [from_plain(item, known.get(key)) for key, item in zip(keys, content, strict=True)], keys)
        return filled
    there = list(current) if isinstance(current, (list, tuple, deque)) and len(current) == len(content) else []
    items = [from_plain(item, now) for item, now in zip_longest(content, there)]
    if kind == "tuple":
        fits = isinstance(current, tuple) and len(current) == len(items)
        return tuple_like(current, items) if fits else tuple(items)
    made: Any = [] if kind == "list" else set() if kind == "set" else deque(maxlen=more[0])
    container = current if isinstance(current, type(made)) else made
    fill(container, items, None)
    return container


def _torch_generator(state: Tensor, current: Any) -> torch.Generator | None:
    """Return a generator whose states are as large as ``state``, which differs from device to device."""
    if isinstance(current, torch.Generator) and current.get_state().shape == state.shape:
        return current
    new = (torch.Generator(device) for device in (HOST, plain.own_device()))
    return next((generator for generator in new if generator.get_state().shape == state.shape), None)


def _generator(state: Any, current: Any) -> Any:
    """Return the generator that is there, with the state; a new one where there is none of that kind."""
    if isinstance(state, Tensor):
        generator: Any = _torch_generator(state, current)
        if generator is None:
            return current
    elif isinstance(state, dict):
        name = state["bit_generator"]
        fits = isinstance(current, np.random.Generator) and type(current.bit_generator).__name__ == name
        generator = current if fits else np.random.Generator(getattr(np.random, name)())
    elif len(state) == _OF_RANDOM_STATE:
        generator = current if isinstance(current, np.random.RandomState) else np.random.RandomState()
    else:
        generator = current if isinstance(current, random.Random) else random.Random()
    set_random(generator, state)
    return generator
