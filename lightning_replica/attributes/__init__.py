"""Plain attributes of modules: counters, flags, hidden states, lists in which outputs are collected for an epoch's end.

A rank that goes back a step puts them back, so that a batch that is done again finds them as it did the first time: in
the LightningModule and in all submodules, but for those of torch's own classes, which keep nothing but settings there.
State are numbers, strings, None, tensors, arrays, generators and containers of these; other objects are left alone.

What belongs to one rank is mirrored to its peers, for its replacement: the hidden state of a recurrent network is
another on every rank. Sent is what has changed since training began. Of a large attribute (`LARGE_BYTES`, `MANY`),
mostly a list that grows for an epoch, nothing is mirrored, as that would take time in every step: a replacement has a
peer's. Large arrays of NumPy are data, and left alone.

A tensor with a graph comes back without it. A graph that leads from one step into the next is not put back.
"""

import operator
from collections import deque
from collections.abc import Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, field
from typing import Any

import lightning.pytorch as pl
import numpy as np
from torch import Tensor, nn
from torchmetrics import Metric

from lightning_replica.attributes.plain_form import from_plain, plain_values, to_plain
from lightning_replica.attributes.values import (
    ATOMS,
    CONTAINERS,
    DEEP,
    GENERATORS,
    LARGE_BYTES,
    MANY,
    Kept,
    KeptArray,
    KeptContainer,
    KeptGenerator,
    KeptObject,
    KeptTensor,
    KeptTuple,
    put_back_value,
    random_state,
    same,
)

__all__ = ["Copies", "Taken", "is_state", "put", "put_plain", "put_plain_into", "to_plain"]


class _Bare(Metric):
    """Has what every torchmetrics object has."""

    def update(self) -> None:
        """Have no state."""

    def compute(self) -> None:
        """Come to nothing."""


# Not the user's, or put back by others: a metric's declared states by metrics.py.
_OWN = frozenset(vars(pl.LightningModule()))
_OWN_OF_METRICS = _OWN | frozenset(vars(_Bare()))
_STATE = (*CONTAINERS, np.ndarray, Tensor, *GENERATORS)
_LARGE_ARRAY_BYTES = 2**18  # arrays do not say whether they were written to: they are copied in every snapshot


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
        return plain_values(self.changed, LARGE_BYTES)

    def whole(self) -> list[Any]:
        """All that may travel to another rank, as plain data."""
        return plain_values(self.values, None)


class Copies:
    """Copies of tensors, kept from one snapshot to the next, and what attributes were when training began.

    Args:
        module: The LightningModule, before training and before its sanity check, which a replacement does not run.
    """

    def __init__(self, module: pl.LightningModule) -> None:
        self._tensors: dict[int, KeptTensor] = {}
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
            own = _own(module)
            values = {
                name: self._keep(value, former, not _is_large(value))
                for name, value in vars(module).items()
                if name not in own and is_state(value)
            }
            taken.values[number] = values
            first = self._first.get(number, {})
            changed = {n: kept for n, kept in values.items() if n not in first or not same(kept, first[n])}
            if changed:
                taken.changed[number] = changed
        return taken

    def _keep(self, value: Any, former: dict[int, KeptTensor], copied: bool, depth: int = 0) -> Kept:
        kind = type(value)
        if kind in ATOMS:
            return value
        if isinstance(value, Tensor):
            kept = self._tensors.get(id(value)) or former.get(id(value))
            if kept is None or not kept.is_of(value, copied):
                kept = KeptTensor(value, copied)
            self._tensors[id(value)] = kept
            return kept
        if isinstance(value, CONTAINERS) and depth < DEEP:
            return self._keep_container(value, former, copied, depth + 1)
        if isinstance(value, np.ndarray) and value.nbytes <= _LARGE_ARRAY_BYTES:
            return KeptArray(value, value.copy())
        return KeptGenerator(value, random_state(value)) if isinstance(value, GENERATORS) else KeptObject(value)

    def _keep_container(self, value: Any, former: dict[int, KeptTensor], copied: bool, depth: int) -> Kept:
        items = list(value.values() if isinstance(value, dict) else value)
        if len(items) <= MANY:
            items = [self._keep(item, former, copied, depth) for item in items]
        if isinstance(value, tuple):
            return value if all(map(operator.is_, items, value)) else KeptTuple(value, items)
        return KeptContainer(value, items, list(value) if isinstance(value, dict) else None)


def put(modules: Sequence[nn.Module], taken: Taken) -> None:
    """Puts back what this rank itself has taken; what has come into being since goes."""
    for number, saved in taken.values.items():
        now, own = vars(modules[number]), _own(modules[number])
        for name in [name for name, value in now.items() if name not in saved and name not in own and is_state(value)]:
            del now[name]
        for name, kept in saved.items():
            if not _is_registered(modules[number], name):
                now[name] = put_back_value(kept, name)


def put_plain(modules: Sequence[nn.Module], sent: list[Any]) -> None:
    """Puts what another rank has sent into a replacement; containers that are there already are filled."""
    for number, values in sent:
        module = modules[number]  # which may have made a parameter, a buffer or a submodule of what was an attribute
        put_plain_into(vars(module), [pair for pair in values if not _is_registered(module, pair[0])])


def put_plain_into(attributes: dict[str, Any], sent: list[Any]) -> None:
    """Puts pairs of a name and of what `to_plain` has made of its value."""
    for name, value in sent:
        attributes[name] = from_plain(value, attributes.get(name))


def is_state(value: Any) -> bool:
    """Whether an attribute is state; other objects are not known well enough to be put back."""
    return type(value) in ATOMS or isinstance(value, _STATE)


def _keeps_nothing(module: nn.Module) -> bool:
    """Whether attributes are settings only: torch's own, unless a hook makes weights of it, as pruning does."""
    return type(module).__module__.startswith("torch.") and not module._forward_pre_hooks


def _own(module: nn.Module) -> AbstractSet[str]:
    """The names of attributes that are not the user's, or that others put back."""
    return _OWN_OF_METRICS | module._defaults.keys() if isinstance(module, Metric) else _OWN


def _is_registered(module: nn.Module, name: str) -> bool:
    return name in module._parameters or name in module._buffers or name in module._modules


def _is_large(value: Any) -> bool:
    if not isinstance(value, (list, deque)):
        return False
    return sum(item.numel() * item.element_size() for item in value if isinstance(item, Tensor)) > LARGE_BYTES
