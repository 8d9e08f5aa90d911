"""The param groups of a trainer's optimizers: which parameters they hold, and their hyperparameters."""

import copy
import hashlib
from collections.abc import Mapping
from typing import Any

import torch

from lightning_replica._compat.lightning_names import pl
from lightning_replica._compat.tree import Tree

_SHORT = 120  # characters of a hyperparameter in a message


def take(trainer: pl.Trainer, tree: Tree) -> list[list[dict[str, Any]]]:
    """Return the param groups of all optimizers, with positions in the module in place of parameters."""
    return [
        [{**group, "params": [tree.order[id(p)] for p in group["params"]]} for group in optimizer.param_groups]
        for optimizer in trainer.optimizers
    ]


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
            group = {**copy.deepcopy(saved), "params": [parameters[index] for index in saved["params"]]}
            if place < len(optimizer.param_groups):
                now = optimizer.param_groups[place]  # the user's object, which code may refer to
                for name in now.keys() - group.keys():
                    del now[name]
                now.update(group)
            else:
                optimizer.param_groups.append(group)


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
