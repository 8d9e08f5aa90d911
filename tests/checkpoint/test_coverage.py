"""A checkpoint whose every file is as it was written, but which does not hold every element once, is not whole."""

import dataclasses
import json
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from lightning_replica._compat.torch import read_dcp_metadata
from lightning_replica.checkpoint import coverage, verification
from lightning_replica.checkpoint.contents import read_contents
from lightning_replica.checkpoint.export import export
from lightning_replica.checkpoint.manifest import FileInfo
from lightning_replica.errors import CheckpointError
from tests.checkpoint.small import directory_of, load, save
from tests.support.typed import on_disk

NAME = "model.first.weight"  # [7, 20]


def rewrite(path: Path, change: Callable[[Any], object]) -> None:
    """Changes the metadata as if it had been written so."""
    metadata = read_dcp_metadata((path / ".metadata").read_bytes())
    change(metadata)
    (path / ".metadata").write_bytes(pickle.dumps(metadata))
    manifest = verification.read_manifest(path)
    files = {**manifest.files, ".metadata": FileInfo.of(path / ".metadata")}
    changed = dataclasses.replace(manifest, files=files)
    (path / "manifest.json").write_text(json.dumps(changed.as_plain()))


def chunks(change: Callable[[int, int], list[tuple[int, int]]]) -> Callable[[Any], None]:
    """Cuts a tensor's chunks into others, given as (first element, elements); all lie where the first of them does."""

    def do(metadata: Any) -> None:
        stored = metadata.state_dict_metadata[NAME]
        whole = next(index for index in metadata.storage_data if index.fqn == NAME)
        places = [place for each in stored.chunks for place in change(each.offsets[0], each.sizes[0])]
        stored.chunks = [
            dataclasses.replace(stored.chunks[0], offsets=torch.Size([start]), sizes=torch.Size([count]))
            for start, count in places
        ]
        for start, _ in places:
            index = dataclasses.replace(whole, offset=torch.Size([start]))
            metadata.storage_data[index] = metadata.storage_data[whole]

    return do


def storage(**changes: Any) -> Callable[[Any], None]:
    def do(metadata: Any) -> None:
        for index, info in list(metadata.storage_data.items()):
            if index.fqn == NAME:
                metadata.storage_data[index] = dataclasses.replace(info, **changes)

    return do


def retype(metadata: Any) -> None:
    metadata.state_dict_metadata[NAME].properties.dtype = torch.float64


def add(metadata: Any) -> None:
    metadata.state_dict_metadata["model.zzz"] = metadata.state_dict_metadata[NAME]


TENSOR = f"the tensor '{NAME}'"
DAMAGE: dict[str, tuple[Callable[[Any], object], str]] = {
    "no tensor": (lambda m: m.state_dict_metadata.pop(NAME), f".metadata does not list {TENSOR}"),
    "one more": (add, "contents.pt does not list the tensor 'model.zzz'"),
    "no chunk": (chunks(lambda start, count: []), f"{TENSOR} lacks elements 0 to 140"),
    "a hole": (chunks(lambda start, count: [(0, 100), (101, 39)]), f"{TENSOR} lacks elements 100 to 101"),
    "an overlap": (chunks(lambda start, count: [(0, 100), (90, 50)]), f"{TENSOR} has elements 90 to 100 twice"),
    "twice": (chunks(lambda start, count: [(0, 140), (0, 140)]), f"{TENSOR} has elements 0 to 140 twice"),
    "the end": (chunks(lambda start, count: [(0, 139)]), f"{TENSOR} lacks elements 139 to 140"),
    "too much": (chunks(lambda start, count: [(0, 150)]), f"{TENSOR} has elements 140 to 150 beyond"),
    "dtype": (retype, f"{TENSOR} should be [140] float32, but .metadata says [140] float64"),
    "beyond a file": (storage(offset=1 << 30), f"{TENSOR} is not whole in the files"),
    "elsewhere": (storage(relative_path="../x"), f"{TENSOR} is not whole in the files"),
    "not stored": (lambda m: m.storage_data.clear(), "is not whole in the files"),
}


@pytest.mark.parametrize("damage", DAMAGE)
def test_what_is_not_there_once_is_named_and_nothing_reads_it(tmp_path: Path, damage: str) -> None:
    directory = directory_of(tmp_path, 1, 2)
    change, said = DAMAGE[damage]
    rewrite(on_disk(directory.path_of(2)), change)
    verification.verify(directory.path_of(2))  # as far as files go, all is well
    latest = directory.latest()
    assert latest.path == directory.path_of(1)
    assert f"The checkpoint {directory.path_of(2)} cannot be used: " in latest.problems[0]
    assert said in latest.problems[0]
    with pytest.raises(CheckpointError, match="cannot be used"):
        load(directory.path_of(2))
    with pytest.raises(CheckpointError, match="cannot be used"):
        export(directory.path_of(2), tmp_path / "one.ckpt")
    with pytest.raises(CheckpointError, match="cannot be used"):
        directory.track("step_00000002")


def test_chunks_may_be_cut_anywhere(tmp_path: Path) -> None:
    path = save(tmp_path / "step", 1, 1)
    rewrite(path, chunks(lambda start, count: [(100, 40), (0, 60), (60, 40)]))
    coverage.check(path, verification.check(path), read_contents(path))
