"""Values as plain data, for another process."""

from collections import deque
from collections.abc import Iterable
from typing import Any

import numpy as np
import torch
from torch import Tensor

from lightning_replica import plain
from lightning_replica.attributes.values import (
    ATOMS,
    MANY,
    Kept,
    KeptArray,
    KeptContainer,
    KeptGenerator,
    KeptTensor,
    KeptTuple,
    Sent,
    fill,
    random_state,
    set_random,
    tuple_like,
)
from lightning_replica.devices.host import HOST


def plain_values(values: dict[int, dict[str, Kept]], limit: int | None) -> list[Any]:
    """Return plain data for all that can travel and takes no more than ``limit`` bytes."""
    sent: list[Any] = []
    for number, attributes in values.items():
        known = []
        for name, kept in attributes.items():
            try:
                if limit is None or (_nbytes(kept) <= limit and _count(kept) <= MANY):
                    known.append([name, kept_to_plain(kept)])
            except plain.NotPlainError:
                continue  # a replacement leaves it as it has built it
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
        NotPlainError: If it holds something of another kind.
    """
    if type(kept) in ATOMS:
        return kept
    if isinstance(kept, Tensor):
        return ["tensor", kept.device == HOST, kept.detach()]
    if isinstance(kept, (KeptTensor, Sent)):
        return kept.plain()
    if isinstance(kept, tuple):
        return ["tuple", [kept_to_plain(item) for item in kept]]
    if isinstance(kept, KeptTuple):
        return ["tuple", [kept_to_plain(item) for item in kept.items]]
    if isinstance(kept, KeptContainer):
        return _container_to_plain(kept.itself, kept.items, kept.keys)
    if isinstance(kept, KeptArray) and kept.content.dtype.kind in "biufc":
        return ["array", torch.from_numpy(kept.content)]
    if isinstance(kept, KeptGenerator):
        return ["random", _to_plain_state(kept.state)]
    raise plain.NotPlainError(f"it holds a {type(getattr(kept, 'itself', kept)).__qualname__}")


def _container_to_plain(container: Any, items: Iterable[Kept], keys: Iterable[Any] | None) -> Any:
    sent = [kept_to_plain(item) for item in items]
    if keys is not None:
        return ["dict", sent, [kept_to_plain(key) for key in keys]]
    if isinstance(container, deque):
        return ["deque", sent, container.maxlen]
    return ["list" if isinstance(container, list) else "set", sent]


def to_plain(value: Any) -> Any:
    """Plain data for a value as it is now; `put_plain_into` knows what it stands for.

    Raises:
        NotPlainError: If it holds something of another kind.
    """
    if isinstance(value, tuple):
        return ["tuple", [to_plain(item) for item in value]]
    if isinstance(value, (dict, list, set, deque)):
        keys, items = (list(value), value.values()) if isinstance(value, dict) else (None, value)
        return _container_to_plain(value, [Sent(to_plain(item)) for item in items], keys)
    if isinstance(value, np.ndarray):
        return kept_to_plain(KeptArray(value, value.copy()))
    state = random_state(value)
    return kept_to_plain(value if state is None else KeptGenerator(value, state))


def _to_plain_state(state: Any) -> Any:
    if isinstance(state, (tuple, list)):
        return ["tuple", [_to_plain_state(item) for item in state]]
    if isinstance(state, dict):
        return ["dict", [_to_plain_state(item) for item in state.values()], list(state)]
    if isinstance(state, np.ndarray):
        return ["array", torch.from_numpy(state.copy())]
    return ["tensor", True, state] if isinstance(state, Tensor) else state


def from_plain(sent: Any, current: Any, device: torch.device) -> Any:
    """What was sent, in the container that is there if that is of its kind."""
    if not isinstance(sent, list):
        return sent
    kind, content, *more = sent
    if kind == "tensor":
        return more[0] if content else more[0].to(device)
    if kind == "array":
        array = content.numpy()
        if isinstance(current, np.ndarray) and (current.shape, current.dtype) == (array.shape, array.dtype):
            current[...] = array
            return current
        return array
    if kind == "random":
        if random_state(current) is not None:
            set_random(current, from_plain(content, None, device))
        return current
    if kind == "dict":
        keys = [from_plain(key, None, device) for key in more[0]]
        filled: dict[Any, Any] = current if isinstance(current, dict) else {}
        known = dict(filled)
        fill(filled, [from_plain(item, known.get(key), device) for key, item in zip(keys, content, strict=True)], keys)
        return filled
    items = [from_plain(item, None, device) for item in content]
    if kind == "tuple":
        fits = isinstance(current, tuple) and len(current) == len(items)
        return tuple_like(current, items) if fits else tuple(items)
    made: Any = [] if kind == "list" else set() if kind == "set" else deque(maxlen=more[0])
    container = current if isinstance(current, type(made)) else made
    fill(container, items, None)
    return container
