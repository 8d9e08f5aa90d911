"""Compares what all ranks must have in common, before any rank waits for another in a collective."""

import hashlib
import json
import platform
import socket
from collections.abc import Callable, Mapping
from typing import Any, Final

import torch
from torch import nn

from lightning_replica.control import keys
from lightning_replica.control.gathering import Conclude
from lightning_replica.control.generation import Generations
from lightning_replica.core.grids import Grids
from lightning_replica.errors import ConfigurationError

_MOST_SAID: Final = 5


def versions() -> dict[str, str]:
    """Return the versions that determine what a step computes and what ranks send each other."""
    return {
        "python": ".".join(platform.python_version_tuple()[:2]),
        "torch": torch.__version__,
    }


def node() -> str:
    """Return this machine's name."""
    return socket.gethostname()


def describe_model(module: nn.Module) -> dict[str, str]:
    """Return a description of each parameter, by name: its shape, its dtype, and "frozen" if it is not trained."""
    return {
        name: f"{tuple(p.shape)} {str(p.dtype).removeprefix('torch.')}{'' if p.requires_grad else ' frozen'}"
        for name, p in module.named_parameters()
    }


def compare(
    generations: Generations,
    topic: str,
    rank: int,
    world_size: int,
    facts: Mapping[str, Any],
    advice: str,
    timeout_s: float,
    also: Callable[[list[dict[str, Any]]], Any] = lambda _: None,
) -> Any:
    """Check that ``facts`` are the same on every rank.

    A replacement is compared with what the ranks have agreed on before.

    Args:
        generations: The log of generations, through whose store ranks exchange the facts.
        topic: Name of this comparison. Each topic is compared only once.
        rank: This rank.
        world_size: Number of ranks.
        facts: Plain data by name. Facts whose name begins with an underscore are exchanged but may differ.
        advice: What the user should do if facts differ.
        timeout_s: How long to wait for the other ranks, in seconds.
        also: Makes more plain data of the facts of all ranks, in order of rank. Called on one rank.

    Returns:
        What ``also`` has returned.

    Raises:
        ConfigurationError: On every rank, if facts differ. The message names the ranks and their values.
    """

    def conclude(everyone: list[dict[str, Any]]) -> dict[str, Any]:
        for name in sorted({name for each in everyone for name in each if not name.startswith("_")}):
            said = _difference({rank: json.dumps(each.get(name)) for rank, each in enumerate(everyone)})
            if said:
                raise ConfigurationError(f"Ranks disagree on {name}: {said}. {advice}")
        return {"facts": everyone[0], "also": also(everyone)}

    agreed = agree(generations, topic, rank, world_size, dict(facts), timeout_s, conclude)
    for name, value in agreed["facts"].items():
        own = json.loads(json.dumps(facts.get(name)))
        if not name.startswith("_") and own != value:
            raise ConfigurationError(
                f"Ranks disagree on {name}: {json.dumps(own)} in this replacement of rank {rank}; {json.dumps(value)}"
                f" on the other ranks. {advice}"
            )
    return agreed["also"]


def agree(
    generations: Generations,
    topic: str,
    rank: int,
    world_size: int,
    own: dict[str, Any],
    timeout_s: float,
    conclude: Conclude,
) -> Any:
    """Return what one rank concludes from the parts of all, once for each topic.

    A replacement gets what was concluded before.
    """
    topic = keys.facts(topic)
    if generations.current > 0 and generations.gathering.known(topic):
        return generations.gathering.result(topic)
    ranks = range(world_size)
    return generations.conclude(topic, rank, own, generations.current, ranks, timeout_s, conclude)


def compare_sources(
    generations: Generations,
    rank: int,
    world_size: int,
    own: Mapping[str, str],
    timeout_s: float,
    may_differ: Callable[[str], bool],
) -> list[str]:
    """Check that all ranks run the same sources, as far as they have them in common with rank 0 (`core.runtime`).

    Args:
        generations: The log of generations, through whose store ranks exchange what they have.
        rank: This rank.
        world_size: Number of ranks.
        own: Digests or versions of this rank's sources, by name.
        timeout_s: How long to wait for the other ranks, in seconds.
        may_differ: Whether that is no error, for the source of a name.

    Returns:
        The names of sources that may differ, and do.

    Raises:
        ConfigurationError: On every rank, if they do not; or on a replacement that runs other sources than the run.
    """
    digest = hashlib.sha256(json.dumps(sorted(own.items())).encode()).hexdigest()
    first = {"sources": dict(own)} if rank == 0 else {}

    def conclude(everyone: list[dict[str, Any]]) -> dict[str, Any]:
        digests = {each["digest"] for each in everyone}
        return {"sources": everyone[0]["sources"], "digest": digest if digests == {digest} else None}

    agreed = agree(generations, "sources", rank, world_size, {"digest": digest, **first}, timeout_s, conclude)
    if agreed["digest"] == digest:
        return []
    differ = sorted(name for name, value in agreed["sources"].items() if own.get(name, value) != value)
    changed = [name for name in differ if not may_differ(name)]
    if generations.current > 0 and changed:
        raise ConfigurationError(
            f"This replacement of rank {rank} runs other sources than the run began with:"
            f" {_say_sources(changed, own, agreed['sources'])}. It would train something else. Start the whole run"
            " again; it continues from its newest checkpoint."
        )
    if agreed["digest"] is None:
        agree(
            generations,
            "sources/changed",
            rank,
            world_size,
            {"changed": _say_sources(changed, own, agreed["sources"]), "node": node()},
            timeout_s,
            _refuse_other_sources,
        )
    return [name for name in differ if may_differ(name)]


def _say_sources(changed: list[str], own: Mapping[str, str], first: Mapping[str, str]) -> str:
    packages = [f"{name} is {own[name]}, not {first[name]}" for name in changed if name.startswith("package ")]
    files = [f"{name} has other contents" for name in changed if not name.startswith("package ")]
    return ", ".join([*files, *packages][:_MOST_SAID])


def _refuse_other_sources(everyone: list[dict[str, Any]]) -> None:
    said: dict[str, list[str]] = {}
    for rank, each in enumerate(everyone):
        if each["changed"]:
            said.setdefault(f"{each['changed']} on node {each['node']}", []).append(str(rank))
    if said:
        what = "; ".join(
            f"{difference} (rank{'s' * (len(who) > 1)} {', '.join(who)})" for difference, who in said.items()
        )
        raise ConfigurationError(
            f"Ranks run other sources than rank 0: {what}. They would train something else. Install the same sources"
            " and packages on all nodes."
        )


def agree_on_hardware(
    generations: Generations, rank: int, world_size: int, own: Mapping[str, str], threads: int, timeout_s: float
) -> tuple[dict[str, str], int]:
    """Return on what a rank has begun the run: its hardware (`core.runtime`), and its number of threads."""

    def conclude(everyone: list[dict[str, Any]]) -> list[dict[str, Any]]:
        return everyone if any(each != everyone[0] for each in everyone) else everyone[:1]

    own_part = {"hardware": dict(own), "threads": threads}
    agreed = agree(generations, "hardware", rank, world_size, own_part, timeout_s, conclude)
    began = agreed[rank if len(agreed) > 1 else 0]
    return began["hardware"], began["threads"]


def compare_models(
    generations: Generations,
    topic: str,
    rank: int,
    grids: Grids,
    module: nn.Module,
    timeout_s: float,
) -> None:
    """Check that all ranks of a grid train the same parameters.

    Raises:
        ConfigurationError: On every rank, if they do not. The message names the first parameter that differs.
    """
    own = describe_model(module)
    advice = "Build the same model on every rank: its shape must not depend on the rank or on random numbers."
    digest = hashlib.sha256(json.dumps(own).encode()).hexdigest()

    def only(everyone: list[dict[str, Any]]) -> list[str]:
        """Return the digest of every grid if it is the same on all ranks of each; otherwise nothing."""
        found = [{everyone[rank]["model"] for rank in grid.ranks} for grid in grids.grids]
        return [each for digests in found for each in digests] if all(len(digests) == 1 for digests in found) else []

    agreed = agree(generations, topic, rank, grids.size, {"model": digest}, timeout_s, only)
    if agreed and agreed[grids.number_of(rank)] != digest:
        raise ConfigurationError(f"This replacement of rank {rank} has built another model than all ranks. {advice}")
    if agreed:
        return

    def name_difference(everyone: list[dict[str, Any]]) -> None:
        for grid in grids.grids:
            _compare_parameters({rank: everyone[rank] for rank in grid.ranks}, advice)

    agree(generations, f"{topic}/parameters", rank, grids.size, own, timeout_s, name_difference)


def _compare_parameters(models: Mapping[int, Mapping[str, str]], advice: str) -> None:
    for name in dict.fromkeys(name for model in models.values() for name in model):
        said = _difference({rank: model.get(name, "missing") for rank, model in models.items()})
        if said:
            raise ConfigurationError(f"Ranks disagree on the model's parameter {name!r}: {said}. {advice}")
    if len({tuple(model) for model in models.values()}) > 1:
        raise ConfigurationError(f"Ranks disagree on the order of the model's parameters. {advice}")


def _difference(values: Mapping[int, str]) -> str:
    """Return which ranks have which value if the values differ; otherwise an empty string."""
    holders: dict[str, list[str]] = {}
    for rank, value in values.items():
        holders.setdefault(value, []).append(str(rank))
    if len(holders) == 1:
        return ""
    return "; ".join(f"{value} on rank{'s' * (len(who) > 1)} {', '.join(who)}" for value, who in holders.items())
