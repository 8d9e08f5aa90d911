"""The param groups of a trainer's optimizers: which parameters they hold, and their hyperparameters."""

import copy
import hashlib
from collections.abc import Mapping
from typing import Any

import torch

from lightning_replica._compat.lightning_names import pl
from lightning_replica._compat.tree import Tree
from lightning_replica.state.atoms import ATOMS

_SHORT = 120  # characters of a hyperparameter in a message


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
    return value.detach().clone() if isinstance(value, torch.Tensor) else copy.deepcopy(value)


def put_back(trainer: pl.Trainer, replicated: Mapping[str, Any]) -> None:
    """Restore the param groups with their contents, and which parameters are trained.

    Args:
        trainer: The trainer.
        replicated: The replicated part of a snapshot.
    """
    parameters = list(trainer.lightning_module.parameters())
    for parameter, required in zip(parameters, replicated["requires_grad"], strict=True):
        parameter.requires_grad_(required)
    for optimizer, groups in zip(trainer.optimizers, replicated["groups"], strict=True):
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
