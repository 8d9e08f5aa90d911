"""Inspection of a checkpoint that is one file: an ordinary ``.ckpt``, or any file that ``torch.save`` wrote.

torch writes a zip archive with a CRC-32 for each record. torch does not check these when it loads.
"""

import zipfile
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

import torch
from torch import Tensor

from lightning_replica.checkpoint.archive import damage_in
from lightning_replica.checkpoint.location import Location
from lightning_replica.checkpoint.which_storage import storage_of
from lightning_replica.core.output import size, table
from lightning_replica.devices.host import HOST
from lightning_replica.errors import CheckpointError
from lightning_replica.trainer.saving.checkpoints import OWN_KEY


@dataclass(frozen=True)
class _Foreign:
    """The types in a file that are neither torch's nor plain data: reading objects of these types would run code."""

    types: list[str]


def inspect(path: Location, verify: bool, tensors: bool) -> tuple[dict[str, Any], list[str]]:
    """Inspect a file.

    Args:
        path: The file, or the URL of an object.
        verify: Whether to compare the checksum of every record.
        tensors: Whether to list all tensors.

    Returns:
        The facts about the file, as plain data, and a list of what is wrong with it.

    Raises:
        CheckpointError: If the file cannot be opened.
    """
    with _opened(path) as stream:
        zipped = zipfile.is_zipfile(stream)
        facts: dict[str, Any] = {"path": str(path), "form": "file", "size_bytes": stream.seek(0, 2)}
        stream.seek(0)
        problem = damage_in(stream) if verify and zipped else ""
        read, problem = (None, problem) if problem else _read(stream, path, zipped)
    if isinstance(read, Mapping):
        facts |= _inside(read, tensors)
    elif isinstance(read, _Foreign):
        facts["objects"] = read.types
    facts |= {"whole": not problem, "checksums": zipped, "verified": verify and zipped and not problem}
    return facts, [f"The checkpoint {path} cannot be used: {problem}."] if problem else []


def _opened(path: Location) -> AbstractContextManager[IO[bytes]]:
    try:
        return storage_of(path).open()
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read: {error.strerror}.") from error


def _read(stream: IO[bytes], path: Location, zipped: bool) -> tuple[Any, str]:
    """Read a file without running any code that is in it.

    Returns:
        The content, or the types that prevent reading; and what is wrong, or an empty string.
    """
    stream.seek(0)
    try:
        if zipped and isinstance(path, Path):
            return torch.load(path, map_location=HOST, weights_only=True, mmap=True), ""
        return torch.load(stream, map_location=HOST, weights_only=True), ""
    except Exception as error:  # torch promises no error type for damaged files
        stream.seek(0)
        foreign = _foreign(stream) if zipped else []
        if foreign:
            return _Foreign(foreign), ""
        if not zipped:
            return None, "it is not a file that torch.save has written, or only part of one"
        return None, f"torch cannot read it ({type(error).__name__}: {str(error).splitlines()[0]})"


def _foreign(stream: IO[bytes]) -> list[str]:
    """Name the types in a file that torch loads only with ``weights_only=False``."""
    try:
        return sorted(torch.serialization.get_unsafe_globals_in_checkpoint(stream))
    except Exception:  # the file is damaged in another way, which `_read` reports
        return []


def _inside(read: Mapping[str, Any], tensors: bool) -> dict[str, Any]:
    weights = read.get("state_dict", read)
    found = {str(name): value for name, value in _tensors(weights)}
    version = read.get("pytorch-lightning_version")
    facts: dict[str, Any] = {
        "weights": sum(each.numel() for each in found.values()),
        "weight_tensors": len(found),
        "dtypes": sorted({str(each.dtype).removeprefix("torch.") for each in found.values()}),
    }
    if version is not None:
        states = read.get("optimizer_states", [])
        facts |= {
            "step": read.get("global_step"),
            "epoch": read.get("epoch"),
            "versions": {"lightning": str(version)},
            "optimizers": [sum(value.numel() for _, value in _tensors(each)) for each in states],
            "schedulers": len(read.get("lr_schedulers", [])),
            "callbacks": [str(name).split("{")[0] for name in read.get("callbacks", {})],
            "world_size": _world_size(read),
        }
    if tensors:
        facts["tensors"] = {
            name: {"elements": value.numel(), "dtype": str(value.dtype).removeprefix("torch.")}
            for name, value in found.items()
        }
    return facts


def _world_size(read: Mapping[str, Any]) -> int | None:
    """Return the number of ranks whose exact resume point is in a checkpoint; None if it holds none."""
    own = read.get(OWN_KEY)
    place = own.get("resume") if isinstance(own, Mapping) else None
    found = place.get("world_size") if isinstance(place, Mapping) else None
    return found if isinstance(found, int) else None


def _tensors(value: Any, name: str = "") -> Iterator[tuple[str, Tensor]]:
    if isinstance(value, Tensor):
        yield name, value
    elif isinstance(value, Mapping):
        for key, each in value.items():
            yield from _tensors(each, f"{name}.{key}" if name else str(key))


def render(facts: dict[str, Any]) -> str:
    """Return a description of a file, as text for people."""
    lines = {"checkpoint": facts["path"]}
    if "versions" in facts:
        lines["form"] = f"one file, as Lightning {facts['versions']['lightning']} writes it for every strategy"
        lines["step"] = f"{facts['step']}, in epoch {facts['epoch']}"
    elif facts["whole"]:
        lines["form"] = "one file that torch.save wrote, but not a Lightning checkpoint"
    lines["size"] = size(facts["size_bytes"])
    if "objects" in facts:
        lines["form"] = "one file that torch.save wrote; its content was not read"
        lines["objects"] = f"{', '.join(facts['objects'])}: reading them can run code from the file"
    if "weights" in facts:
        dtypes = f", {', '.join(facts['dtypes'])}" if facts["dtypes"] else ""
        lines["weights"] = f"{facts['weights']:,} elements in {facts['weight_tensors']} tensors{dtypes}"
    if "versions" in facts:
        states = ", ".join(f"{count:,} elements of state" for count in facts["optimizers"])
        lines["optimizers"] = states or "none: it holds weights only"
        lines["callbacks"] = ", ".join(facts["callbacks"]) or "none"
        lines["resume"] = _resume(facts)
    text = "\n".join(f"{name:<13}{value}" for name, value in lines.items())
    rows = [[name, f"{each['elements']:,}", each["dtype"]] for name, each in facts.get("tensors", {}).items()]
    return text + ("\n\n" + table(["tensor", "elements", "dtype"], rows) + "\n" if rows else "")


def _resume(facts: dict[str, Any]) -> str:
    if facts["world_size"] is not None:
        return f"with {facts['world_size']} ranks at the exact batch, to the last bit (written by replica_zero)"
    if not facts["optimizers"]:
        return "no: it has no optimizer state"
    return "at the next batch that repeats no sample, with random numbers of its own"


def conclusion(facts: dict[str, Any]) -> str:
    """Return, for a file without problems, how closely it was checked."""
    if facts["verified"]:
        return "whole, to the last byte"
    if not facts["checksums"]:
        return "it can be read; files in this old torch format have no checksums"
    return ("it has not been read" if "objects" in facts else "it can be read") + "; --verify checks its checksums"
