"""Import of megatron-core's checkpoints (see `torch_dist` for their form), which needs no megatron-core.

The result is a sharded checkpoint with one part, whose every tensor is a whole one of the model. So ranks load it as
one that others have written who divided the model otherwise.
"""

import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint.metadata import TensorStorageMetadata

from lightning_replica._compat.packages import chosen
from lightning_replica._compat.torch import load_known
from lightning_replica.checkpoint.barrier import Barrier
from lightning_replica.checkpoint.chunks import Chunk, ChunkReader
from lightning_replica.checkpoint.contents import (
    CONTENTS,
    PLAIN,
    Contents,
    OptimizerInfo,
    StateInfo,
    TensorInfo,
    as_bytes,
    dtype_name,
    in_part,
    main_key,
    state_key,
    weight_key,
)
from lightning_replica.checkpoint.directory import CheckpointDirectory
from lightning_replica.checkpoint.location import Given, Location
from lightning_replica.checkpoint.manifest import Manifest
from lightning_replica.checkpoint.sharded import Staged, write
from lightning_replica.checkpoint.torch_dist import COMMON, KIND, TRACKER, name_of
from lightning_replica.checkpoint.whole_model import box_of_all
from lightning_replica.errors import CheckpointError

PART = "megatron"  # what the names of an imported model begin with
_STATE = re.compile(r"optimizer\.state\.([^.]+)\.(.+)")
_OF_AN_OPTIMIZER = re.compile(r"(chained_\d+\.)?optimizer\.")
_MAIN = ("param", "fp32_param")


def import_megatron(path: Path, directory: Given) -> tuple[Location, list[str]]:
    """Write a checkpoint of megatron-core's as a sharded checkpoint, from which a fit can start.

    This process works alone. The whole checkpoint must fit into memory.

    Args:
        path: The directory of an iteration, or one that has such directories.
        directory: The directory of a run, or its URL, in which the checkpoint is made.

    Returns:
        The checkpoint; and the tensors that are not in it, because they belong to the optimizer, but to no weight.

    Raises:
        CheckpointError: If there is no checkpoint of megatron-core's, or it cannot be read.
    """
    found = _iteration(path)
    common = _read_common(found)
    reader = ChunkReader(found, [each.name for each in found.iterdir() if each.is_file()], foreign=True)
    infos = {
        name: TensorInfo(dtype_name(each.properties.dtype), tuple(each.size), box_of_all(name, each.size).strides)
        for name, each in reader.metadata.state_dict_metadata.items()
        if isinstance(each, TensorStorageMetadata)
    }
    contents, names = _contents(infos, _steps(common))
    tensors = {name: infos[name].view(infos[name].empty()) for name in names.values()}
    reader.read_whole(tensors)
    chunks = [Chunk(key, tensors[name].numel(), 0, tensors[name].view(-1)) for key, name in names.items()]
    iteration = common.get("iteration", 0)
    target = CheckpointDirectory(directory).path_of(iteration)
    files = {PLAIN: as_bytes(_plain(), "the plain data"), CONTENTS: as_bytes(contents.as_plain(), "the contents")}
    described = Manifest({}, 1, 1, "element", iteration, "imported", {})
    nonempty = tuple(chunk for chunk in chunks if chunk.numel)
    write(Staged(target, nonempty, files, contents, 0, described), Barrier(None))
    return target, sorted(name for name in infos.keys() - {*names.values()} if not _is_a_weight(name, infos))


def _iteration(path: Path) -> Path:
    """Return the directory of the newest iteration.

    Raises:
        CheckpointError: If there is none.
    """
    found = path
    if (path / TRACKER).is_file():
        newest = (path / TRACKER).read_text().strip()
        found = path / (name_of(int(newest)) if newest.isdecimal() else newest)
    try:
        kind = json.loads((found / KIND).read_text())["sharded_backend"]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise CheckpointError(
            f"There is no checkpoint of megatron-core at {found}: {KIND} cannot be read ({type(error).__name__})."
            f" Give the directory of an iteration, or one that has {TRACKER}."
        ) from error
    if kind != "torch_dist":
        raise CheckpointError(f"{found} has the format {kind!r}. Save it with `--dist-ckpt-format torch_dist`.")
    return found


def _read_common(directory: Path) -> dict[str, Any]:
    """Return what is no tensor: plain data, and stand-ins for objects.

    Raises:
        CheckpointError: If the file is missing or damaged.
    """
    try:
        read = load_known((directory / COMMON).read_bytes())
    except Exception as error:  # torch promises no error type
        raise CheckpointError(f"{directory / COMMON} cannot be read ({type(error).__name__}: {error}).") from error
    return read if isinstance(read, dict) else {}


def _contents(infos: Mapping[str, TensorInfo], steps: int | None) -> tuple[Contents, dict[str, str]]:
    """Return what the checkpoint will hold, and the name there of every tensor of megatron-core's that goes into it."""
    weights = {name: info for name, info in infos.items() if not _OF_AN_OPTIMIZER.match(name)}
    state: dict[str, StateInfo] = {}
    main: dict[str, str] = {}
    names = {weight_key(in_part(key, PART)): key for key in weights}
    for name, info in infos.items():
        match = _STATE.fullmatch(name)
        if match is None or match[2] not in weights or weights[match[2]].shape != info.shape:
            continue
        entry, own = match[1], in_part(match[2], PART)
        if entry not in _MAIN:
            state.setdefault(own, StateInfo(plain=_step(steps))).like[entry] = info.dtype
            names[state_key(0, own, entry)] = name
        elif info.dtype != weights[match[2]].dtype:
            main[own] = info.dtype
            names[main_key(own)] = name
    optimizers = [OptimizerInfo("imported", [], state)] if state else []
    boxes = {in_part(key, PART): [box_of_all(key, info.shape)] for key, info in weights.items()}
    named = {in_part(key, PART): info for key, info in weights.items()}
    return Contents(named, {}, main, optimizers, boxes, parts=[PART]), names


def _is_a_weight(name: str, infos: Mapping[str, TensorInfo]) -> bool:
    """Return whether a main parameter is the weight itself, which has as many bits."""
    match = _STATE.fullmatch(name)
    return match is not None and match[1] in _MAIN and match[2] in infos and infos[match[2]] == infos[name]


def _step(steps: int | None) -> dict[str, Any]:
    return {} if steps is None else {"step": torch.tensor(float(steps))}


def _steps(common: Mapping[str, Any]) -> int | None:
    """Return how many steps the optimizer has made: its param groups say so, or else the iteration does."""
    found = [int(group["step"]) for group in _groups(common.get("optimizer")) if isinstance(group.get("step"), int)]
    steps: int | None = max(found, default=common.get("iteration"))
    return steps


def _groups(optimizer: Any) -> list[dict[str, Any]]:
    """Return the param groups of an optimizer, or of those that it is a chain of."""
    if not isinstance(optimizer, dict):
        return []
    inner = optimizer.get("optimizer")
    if isinstance(inner, dict):
        return [group for group in inner.get("param_groups", ()) if isinstance(group, dict)]
    return [group for each in optimizer.values() for group in _groups(each)]


def _plain() -> dict[str, Any]:
    """Return what Lightning finds beside the weights: nothing, so a fit starts with its first step."""
    nothing: dict[str, Any] = {"state_dict": {}, "optimizer_states": [], "lr_schedulers": [], "callbacks": {}}
    return {**nothing, "epoch": 0, "global_step": 0, "pytorch-lightning_version": chosen().version()}
