"""What all ranks must have in common, compared before any of them waits for another in a collective."""

import hashlib
import json
import platform
import socket
from collections.abc import Mapping
from typing import Any

import lightning
import torch
from torch import nn

from lightning_replica.errors import ConfigurationError
from lightning_replica.grid import Grid
from lightning_replica.recovery.generation import Generations


def versions() -> dict[str, str]:
    """Versions that decide what a step computes and what ranks send each other."""
    return {
        "python": ".".join(platform.python_version_tuple()[:2]),
        "torch": torch.__version__,
        "lightning": lightning.__version__,
    }


def node() -> str:
    """This machine's name."""
    return socket.gethostname()


def describe_model(module: nn.Module) -> dict[str, str]:
    """Parameters by name: shape, dtype and whether they are trained."""
    return {
        name: f"{tuple(p.shape)} {str(p.dtype).removeprefix('torch.')}{'' if p.requires_grad else ' frozen'}"
        for name, p in module.named_parameters()
    }


def compare(
    generations: Generations,
    topic: str,
    rank: int,
    grid: Grid,
    facts: Mapping[str, Any],
    advice: str,
    generation: int,
    timeout_s: float,
) -> list[dict[str, Any]]:
    """Makes sure that ``facts`` are the same on every rank.

    Args:
        generations: The log in the store; facts travel through the store.
        topic: Names this comparison; each is made once.
        rank: This rank.
        grid: The table of ranks.
        facts: Plain data by name. Names that begin with an underscore are exchanged but may differ.
        advice: What to do where facts differ.
        generation: In which this rank is; the next one ends the wait.
        timeout_s: How long to wait for the others.

    Returns:
        Every rank's facts, in order of rank.

    Raises:
        ConfigurationError: On every rank, if facts differ; it says on which ranks, and what they have.
    """
    everyone = generations.share(f"facts/{topic}", rank, dict(facts), generation, range(grid.world_size), timeout_s)
    for name in sorted({name for each in everyone for name in each if not name.startswith("_")}):
        said = _difference([json.dumps(each.get(name)) for each in everyone])
        if said:
            raise ConfigurationError(f"Ranks disagree on {name}: {said}. {advice}")
    return everyone


def compare_models(
    generations: Generations,
    topic: str,
    rank: int,
    grid: Grid,
    module: nn.Module,
    generation: int,
    timeout_s: float,
) -> None:
    """Makes sure that all ranks train the same parameters.

    Raises:
        ConfigurationError: On every rank, if they do not; it names the first parameter that differs.
    """
    own = describe_model(module)
    advice = "Build the same model on every rank: its shape must not depend on the rank or on random numbers."
    digest = hashlib.sha256(json.dumps(own).encode()).hexdigest()
    ranks = range(grid.world_size)
    everyone = generations.share(f"facts/{topic}", rank, {"model": digest}, generation, ranks, timeout_s)
    if len({each["model"] for each in everyone}) == 1:
        return
    models = generations.share(f"facts/{topic}/parameters", rank, own, generation, ranks, timeout_s)
    for name in dict.fromkeys(name for model in models for name in model):
        said = _difference([model.get(name, "missing") for model in models])
        if said:
            raise ConfigurationError(f"Ranks disagree on the model's parameter {name!r}: {said}. {advice}")
    raise ConfigurationError(f"Ranks disagree on the order of the model's parameters. {advice}")


def _difference(values: list[str]) -> str:
    """Who has what, if ranks have different values; else nothing."""
    holders: dict[str, list[str]] = {}
    for rank, value in enumerate(values):
        holders.setdefault(value, []).append(str(rank))
    if len(holders) == 1:
        return ""
    return "; ".join(f"{value} on rank{'s' * (len(who) > 1)} {', '.join(who)}" for value, who in holders.items())
