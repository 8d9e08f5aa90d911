"""The param groups of a trainer's optimizers: which parameters they hold, and their hyperparameters.

Code may put objects into them, too. These go back like all other objects of the user's, by `GroupObjects`.
"""

import hashlib
import types
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Final

import numpy as np
import torch

from lightning_replica._compat.lightning_names import pl
from lightning_replica._compat.tree import Tree
from lightning_replica.state.atoms import ATOMS

_SHORT = 120  # characters of a hyperparameter in a message
_DEEP: Final = 8  # containers in containers
_OBJECT: Final = "<an object>"  # stands for one in what `take` returns


class GroupObjects:
    """The objects in param groups as attributes of an object, which other code takes and puts back.

    Attributes:
        holder: What has the attributes.
    """

    def __init__(self) -> None:
        self.holder = types.SimpleNamespace()

    def look(self, trainer: pl.Trainer) -> None:
        """Make the holder have the objects that there are now."""
        held = vars(self.holder)
        if held or any(map(_has_objects, _groups(trainer))):
            held.clear()
            held.update({title: group[name] for title, group, name in _entries(trainer) if not _is_plain(group[name])})

    def put(self, trainer: pl.Trainer) -> None:
        """Put the holder's objects into the groups."""
        held = vars(self.holder)
        for title, group, name in _entries(trainer) if held else ():
            if title in held:
                group[name] = held[title]


def _groups(trainer: pl.Trainer) -> Iterator[dict[str, Any]]:
    return (group for optimizer in trainer.optimizers for group in optimizer.param_groups)


def _has_objects(group: Mapping[str, Any]) -> bool:
    return any(type(value) not in ATOMS and name != "params" and not _is_plain(value) for name, value in group.items())


def _entries(trainer: pl.Trainer) -> Iterator[tuple[str, dict[str, Any], str]]:
    """Yield the entries of all groups: a name for messages, the group, the key."""
    for place, optimizer in enumerate(trainer.optimizers):
        for number, group in enumerate(optimizer.param_groups):
            for name in list(group):
                if name != "params":
                    yield f"{name} of group {number} of optimizer {place}", group, name


def _is_plain(value: Any, depth: int = 0) -> bool:
    if type(value) in ATOMS or isinstance(value, (torch.Tensor, np.ndarray, np.generic)):
        return True
    if depth > _DEEP or type(value) not in (list, tuple, dict):
        return False
    return all(_is_plain(each, depth + 1) for each in (value.values() if isinstance(value, dict) else value))


def take(trainer: pl.Trainer, tree: Tree) -> list[list[dict[str, Any]]]:
    """Return the param groups of all optimizers, with positions in the module in place of parameters."""
    return [[_taken(group, tree) for group in optimizer.param_groups] for optimizer in trainer.optimizers]


def _taken(group: Mapping[str, Any], tree: Tree) -> dict[str, Any]:
    places = [tree.order[id(parameter)] for parameter in group["params"]]
    return {**{name: _copied(value) for name, value in group.items() if name != "params"}, "params": places}


def _copied(value: Any) -> Any:
    """Return a copy of a hyperparameter that code may write to, such as the tensor of a learning rate."""
    if type(value) in ATOMS or (type(value) is tuple and all(type(each) in ATOMS for each in value)):
        return value
    return _copied_part(value) if _is_plain(value) else _OBJECT


def _copied_part(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return value.detach().clone()
    if isinstance(value, np.ndarray):
        return value.copy()
    if isinstance(value, dict):
        return {key: _copied_part(each) for key, each in value.items()}
    return type(value)(map(_copied_part, value)) if isinstance(value, (list, tuple)) else value


def put_back(trainer: pl.Trainer, requires_grad: Sequence[bool], taken: Sequence[Any]) -> None:
    """Restore the param groups with their contents, and which parameters are trained.

    Args:
        trainer: The trainer.
        requires_grad: Whether each parameter is trained.
        taken: What `take` returned.
    """
    parameters = list(trainer.lightning_module.parameters())
    for parameter, required in zip(parameters, requires_grad, strict=True):
        parameter.requires_grad_(required)
    for optimizer, groups in zip(trainer.optimizers, taken, strict=True):
        del optimizer.param_groups[len(groups) :]
        for place, saved in enumerate(groups):
            own = [parameters[index] for index in saved["params"]]
            if place == len(optimizer.param_groups):
                optimizer.param_groups.append({})
            now = optimizer.param_groups[place]  # the user's object, which code may refer to
            for name in now.keys() - saved.keys():
                del now[name]
            now.update({name: _put(now.get(name), value) for name, value in saved.items() if name != "params"})
            now["params"] = own


def _put(now: Any, saved: Any) -> Any:
    """Return what a hyperparameter was. Where it can be written to, it is the same object: code may refer to it."""
    if type(saved) is str and saved == _OBJECT:
        return now
    tensors = isinstance(now, torch.Tensor) and isinstance(saved, torch.Tensor)
    if tensors and (now.shape, now.dtype) == (saved.shape, saved.dtype):
        with torch.no_grad():
            return now.copy_(saved)
    saved = _copied(saved)
    if type(now) is type(saved) is list:
        now[:] = saved
        return now
    if type(now) is type(saved) is dict:
        now.clear()
        now.update(saved)
        return now
    return saved


def hyperparameters(groups: list[list[dict[str, Any]]]) -> dict[str, str]:
    """Describe the param groups of all optimizers in short text, as far as they hold numbers, strings and flags."""
    described = {}
    for number, optimizer in enumerate(groups):
        for name in dict.fromkeys(name for group in optimizer for name in group if name != "params"):
            values = [_value(group.get(name)) for group in optimizer]
            text = ", ".join(values if len(set(values)) > 1 else values[:1])
            if len(text) > _SHORT:
                text = f"{text[:_SHORT]} ... (digest {hashlib.sha256(text.encode()).hexdigest()[:8]})"
            described[f"{name} of optimizer {number}"] = text
    return described


def _value(value: Any) -> str:
    if isinstance(value, torch.Tensor):
        value = value.tolist() if value.numel() <= 1 else ""
    plain_value = value is None or isinstance(value, (bool, int, float, str))
    numbers = isinstance(value, (tuple, list)) and all(isinstance(item, (int, float)) for item in value)
    return repr(value) if plain_value or numbers else "..."
