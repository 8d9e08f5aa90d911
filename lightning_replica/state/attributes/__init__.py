"""Plain attributes of modules: counters, flags, hidden states, lists that collect outputs until the end of an epoch.

A rank that goes back to a snapshot restores them, so that a repeated batch finds them as it did the first time. This
covers the LightningModule and all submodules, except those of torch's own classes, whose attributes are only settings.
Numbers, strings, None, tensors, arrays, generators and containers of these are state. Other objects are left alone.

Attributes may belong to one rank: the hidden state of a recurrent network differs from rank to rank. So they are
mirrored to the peers, for a replacement. Only those that have changed since training began are sent. Large attributes
(`LARGE_BYTES`, `MANY`) are not mirrored, because that would take time in every step: a replacement has a peer's. Most
of them are lists that grow for an epoch. Large NumPy arrays are data, and are left alone.

A tensor with a graph is restored without its graph. A graph that leads from one step into the next is not restored.
"""

import operator
from collections import deque
from collections.abc import Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from torch import Tensor, nn
from torchmetrics import Metric

from lightning_replica._compat.lightning_names import pl
from lightning_replica._compat.tree import Tree
from lightning_replica.state.atoms import ATOMS
from lightning_replica.state.attributes.plain_form import from_plain, plain_values, to_plain
from lightning_replica.state.attributes.values import (
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
    """A torchmetrics object with only the attributes that every such object has."""

    def update(self) -> None:
        """Update nothing."""

    def compute(self) -> None:
        """Compute nothing."""


# Attributes that are not the user's, or that other code restores: state/metrics.py restores a metric's declared states.
_OWN = frozenset(vars(pl.LightningModule()))
_OWN_OF_METRICS = _OWN | frozenset(vars(_Bare()))
_STATE = (*CONTAINERS, np.ndarray, Tensor, *GENERATORS)
_LARGE_ARRAY_BYTES = 2**18  # limits copying: arrays count no writes, so they are copied in every snapshot


@dataclass
class Taken:
    """The attributes of a module and its submodules, at one point.

    Attributes:
        values: The attributes, by number of the submodule, then by name.
        changed: Those of them that are not as they were when training began.
    """

    values: dict[int, dict[str, Kept]] = field(default_factory=dict)
    changed: dict[int, dict[str, Kept]] = field(default_factory=dict)

    def private(self) -> list[Any]:
        """Return the attributes that are mirrored, as plain data."""
        return plain_values(self.changed, LARGE_BYTES)

    def whole(self) -> list[Any]:
        """Return all attributes that can be sent to another rank, as plain data."""
        return plain_values(self.values, None)


class _Constants:
    """A module whose state was only immutable values at a snapshot. If it still has them, nothing need be copied.

    Most modules are like that in all steps of a run: what they keep are settings.

    Args:
        module: The module.
        values: What the snapshot holds of it.
        changed: Those of ``values`` that are not as they were when training began.
    """

    def __init__(self, module: nn.Module, values: dict[str, Kept], changed: dict[str, Kept]) -> None:
        attributes = vars(module)
        self.values, self.changed = values, changed
        self._attributes, self._names = attributes, list(attributes)
        self._types = list(map(type, attributes.values()))  # an attribute of another type may have become state

    @staticmethod
    def suits(module: nn.Module, values: dict[str, Kept]) -> bool:
        """Return whether all of a module's state is immutable."""
        attributes = vars(module)
        return not isinstance(module, Metric) and all(kept is attributes[name] for name, kept in values.items())

    def hold(self, module: nn.Module) -> bool:
        """Return whether the module has the same values as then."""
        now = vars(module)
        return (
            now is self._attributes
            and list(now) == self._names
            and list(map(type, now.values())) == self._types
            and all(map(operator.is_, map(now.__getitem__, self.values), self.values.values()))
        )


class Copies:
    """Copies of tensors, kept from one snapshot to the next, and the attributes as they were when training began.

    Args:
        module: The LightningModule, before training and before its sanity check, which a replacement does not run.
    """

    def __init__(self, module: pl.LightningModule) -> None:
        self._tensors: dict[int, KeptTensor] = {}
        self._first: dict[int, dict[str, Kept]] = {}
        self._tree: Tree | None = None
        self._keepers: list[int] = []  # modules of the tree that may have state whatever their hooks are
        self._constants: dict[int, _Constants] = {}  # by number of the module
        first = self.take(Tree.of(module)).values
        if type(module).on_load_checkpoint is not pl.LightningModule.on_load_checkpoint:
            first.pop(0, None)  # a replacement loads no checkpoint, so all of these are sent to it
        self._first = first
        self._constants.clear()  # these have been compared with nothing

    def take(self, tree: Tree) -> Taken:
        """Return copies of the attributes that the modules of a tree have now."""
        former, self._tensors = self._tensors, {}
        taken = Taken()
        for number in self._numbers(tree):
            values, changed = self._take(number, tree.modules[number], former)
            taken.values[number] = values
            if changed:
                taken.changed[number] = changed
        return taken

    def _take(
        self, number: int, module: nn.Module, former: dict[int, KeptTensor]
    ) -> tuple[dict[str, Kept], dict[str, Kept]]:
        """Return all of a module's attributes, and those of them that have changed since training began."""
        constants = self._constants.get(number)
        if constants is not None and constants.hold(module):
            return constants.values, constants.changed
        own = _own(module)
        values = {
            name: self._keep(value, former, not _is_large(value))
            for name, value in vars(module).items()
            if name not in own and is_state(value)
        }
        first = self._first.get(number, {})
        changed = {n: kept for n, kept in values.items() if n not in first or not same(kept, first[n])}
        if _Constants.suits(module, values):
            self._constants[number] = _Constants(module, values, changed)
        else:
            self._constants.pop(number, None)
        return values, changed

    def _numbers(self, tree: Tree) -> list[int]:
        """Return the numbers of the modules that may have state.

        Attributes of torch's own modules are only settings, unless a hook sets weights, as in pruning.
        """
        if tree is not self._tree:
            self._tree = tree
            self._constants.clear()
            self._keepers = [number for number, each in enumerate(tree.modules) if not number or not _is_torchs(each)]
        hooked = tree.hooked()
        return sorted({*self._keepers, *hooked}) if hooked else self._keepers

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
    """Restore the attributes that this rank itself has taken, and delete those that were added since."""
    for number, saved in taken.values.items():
        now, own = vars(modules[number]), _own(modules[number])
        for name in [name for name, value in now.items() if name not in saved and name not in own and is_state(value)]:
            del now[name]
        for name, kept in saved.items():
            if not _is_registered(modules[number], name):
                now[name] = put_back_value(kept, name)


def put_plain(modules: Sequence[nn.Module], sent: list[Any]) -> None:
    """Put attributes that another rank has sent into a replacement; containers that exist already are filled."""
    for number, values in sent:
        module = modules[number]  # here, an attribute may have become a parameter, a buffer or a submodule
        put_plain_into(vars(module), [pair for pair in values if not _is_registered(module, pair[0])])


def put_plain_into(attributes: dict[str, Any], sent: list[Any]) -> None:
    """Set ``attributes`` from ``sent``: pairs of a name and of what `to_plain` has made of its value."""
    for name, value in sent:
        attributes[name] = from_plain(value, attributes.get(name))


def is_state(value: Any) -> bool:
    """Return whether an attribute is state; too little is known of other objects to restore them."""
    return type(value) in ATOMS or isinstance(value, _STATE)


def _is_torchs(module: nn.Module) -> bool:
    return type(module).__module__.startswith("torch.")


def _own(module: nn.Module) -> AbstractSet[str]:
    """Return the names of attributes that are not the user's, or that other code restores."""
    return _OWN_OF_METRICS | module._defaults.keys() if isinstance(module, Metric) else _OWN


def _is_registered(module: nn.Module, name: str) -> bool:
    return name in module._parameters or name in module._buffers or name in module._modules


def _is_large(value: Any) -> bool:
    if not isinstance(value, (list, deque)):
        return False
    return sum(item.numel() * item.element_size() for item in value if isinstance(item, Tensor)) > LARGE_BYTES
