"""Plain attributes of modules: counters, and the lists in which outputs are collected for an epoch's end.

A rank that goes back a step puts them back, so that a batch that is done again is not counted twice. A replacement
takes a peer's, where they are numbers, strings and containers of these; what differs from rank to rank belongs into
metrics or buffers. Flags (bool) are left as they are: who raises once, shall not raise again because of us.
"""

from collections.abc import Container, Mapping
from typing import Any

import lightning.pytorch as pl
import torch
from torch import Tensor

_OWN_OF_LIGHTNING = frozenset(vars(pl.LightningModule()))
_CONTAINERS = (list, dict, set)


def take(module: torch.nn.Module, own: Container[str] = _OWN_OF_LIGHTNING) -> dict[str, Any]:
    """Copy the attributes that the user's code has set: numbers, tensors, and containers with what they hold.

    Args:
        module: The LightningModule, or another.
        own: Names of what is not the user's.
    """
    return {name: _copy(value) for name, value in vars(module).items() if name not in own and _is_state(value)}


def put(module: torch.nn.Module, saved: Mapping[str, Any]) -> None:
    """The inverse of `take`. Containers are filled again in place; others may hold them too."""
    for name, value in saved.items():
        current = getattr(module, name, None)
        restored = _put_back(current, value)
        if restored is not current:
            setattr(module, name, restored)


def _put_back(current: Any, value: Any) -> Any:
    """Return ``value``, in the container that is there if that is of its kind.

    So hyperparameters, a Counter or a defaultdict, which `take` and a message hold as a plain dict, stay what they are.
    """
    if isinstance(value, list) and isinstance(current, list):
        current[:] = _copy(value)
    elif isinstance(value, dict) and isinstance(current, dict):
        known = dict(current)
        current.clear()
        current.update({key: _put_back(known.get(key), item) for key, item in value.items()})
    elif isinstance(value, set) and isinstance(current, set):
        current.clear()
        current.update(value)
    else:
        return _copy(value)
    return current


def plain(saved: Mapping[str, Any]) -> dict[str, Any]:
    """What of `take` may travel to another rank."""
    return {name: value for name, value in saved.items() if _is_plain(value)}


def _is_state(value: Any) -> bool:
    if isinstance(value, bool):
        return False
    return isinstance(value, (int, float, *_CONTAINERS)) or (isinstance(value, Tensor) and not value.requires_grad)


def _copy(value: Any) -> Any:
    if isinstance(value, Tensor):
        return value.clone()
    if isinstance(value, list):
        return [_copy(item) if isinstance(item, _CONTAINERS) else item for item in value]
    if isinstance(value, dict):
        return {key: _copy(item) if isinstance(item, _CONTAINERS) else item for key, item in value.items()}
    return set(value) if isinstance(value, set) else value


def _is_plain(value: Any) -> bool:
    if isinstance(value, list):
        return all(_is_plain(item) for item in value)
    if isinstance(value, dict):
        return all(isinstance(key, (str, int)) and _is_plain(item) for key, item in value.items())
    return value is None or isinstance(value, (bool, int, float, str, torch.Tensor))
