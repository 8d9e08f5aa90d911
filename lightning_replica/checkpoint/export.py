"""Export of a sharded checkpoint to one file from which plain Lightning resumes."""

import os
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch

from lightning_replica.checkpoint import coverage, publish, verification
from lightning_replica.checkpoint.chunks import ChunkReader
from lightning_replica.checkpoint.contents import WEIGHTS_AT, Contents, TensorInfo, read_contents, state_key, weight_key
from lightning_replica.checkpoint.location import Given, locate
from lightning_replica.checkpoint.reads import Reads
from lightning_replica.checkpoint.sharded import read_plain
from lightning_replica.checkpoint.whole_model import refuse_parts


def export(path: Given, file: str | Path) -> None:
    """Write the sharded checkpoint ``path`` to ``file``, in the form of an ordinary ``.ckpt``.

    This process works alone, without process groups. The whole checkpoint must fit into memory. Main parameters are
    left out, as plain Lightning does not have them.

    Args:
        path: The directory, or its URL.
        file: The file to write. An existing file is replaced atomically.

    Raises:
        CheckpointError: If the checkpoint is damaged, or holds a model in parts; or if the file cannot be written.
    """
    directory = verification.published(locate(path))
    verification.check(directory)
    refuse_parts(read_contents(directory), "Export it with `--format megatron`.")
    _replace(Path(file), read_whole(path))


def read_whole(path: Given, optimizers: bool = True) -> dict[str, Any]:
    """Return what `export` writes.

    Args:
        path: The directory, or its URL.
        optimizers: Whether to read the optimizers' state too. Without it, checksums of tensor files are not compared;
            `load_sharded` does that.

    Raises:
        CheckpointError: If the checkpoint is damaged.
    """
    directory = verification.published(locate(path))
    manifest = verification.verify(directory) if optimizers else verification.check(directory)
    contents, plain = read_contents(directory), read_plain(directory)
    coverage.check(directory, manifest, contents)
    reads = Reads(contents, ChunkReader(directory, manifest.files))
    weights = {name: reads.whole(weight_key(name), info) for name, info in contents.weights.items()}
    weights |= {alias: weights[name] for alias, name in contents.aliases.items()}
    numbers = range(len(contents.optimizers)) if optimizers else ()
    states = [_optimizer_state(number, contents, reads) for number in numbers]
    reads.run()
    place = plain.pop(WEIGHTS_AT, "state_dict")
    others = plain.get(place, {})  # entries of modules' state dicts that are not tensors
    return {**plain, place: {**others, **weights}, "optimizer_states": states}


def _optimizer_state(number: int, contents: Contents, reads: Reads) -> dict[str, Any]:
    """Return what ``Optimizer.state_dict`` returns: parameters are numbered in the order of the param groups."""
    info = contents.optimizers[number]
    place = {name: k for k, name in enumerate(name for group in info.groups for name in group["params"])}
    state: dict[int, dict[str, Any]] = {}
    for name, entries in info.state.items():
        if name not in place:
            continue
        weight = contents.weights[name]
        like = {key: TensorInfo(dtype, weight.shape, weight.stride) for key, dtype in entries.like.items()}
        tensors = {
            key: reads.whole(state_key(number, name, key), each) for key, each in {**like, **entries.whole}.items()
        }
        state[place[name]] = {**entries.plain, **tensors}
    groups = [{**group, "params": [place[name] for name in group["params"]]} for group in info.groups]
    return {"state": state, "param_groups": groups}


def _replace(file: Path, checkpoint: dict[str, Any]) -> None:
    """Write to a temporary file and rename it to ``file``, so that ``file`` is never half-written."""
    unfinished = file.with_name(file.name + ".tmp")
    try:
        with publish.naming(file), unfinished.open("wb") as stream:
            torch.save(checkpoint, stream)
            stream.flush()
            os.fsync(stream.fileno())
        with publish.naming(file):
            unfinished.replace(file)
    except BaseException:
        with suppress(OSError):
            unfinished.unlink(missing_ok=True)
        raise
    with suppress(OSError):  # it is there
        publish.sync(file.parent)
