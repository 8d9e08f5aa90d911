"""Checks that a checkpoint holds every element of every tensor in its contents exactly once."""

from typing import TYPE_CHECKING, cast

from lightning_replica._compat.torch import read_dcp_metadata
from lightning_replica.checkpoint import verification
from lightning_replica.checkpoint.contents import CONTENTS, Contents, dtype_name
from lightning_replica.checkpoint.manifest import MANIFEST, Manifest
from lightning_replica.checkpoint.storage import Readable, damaged

if TYPE_CHECKING:  # the import takes a quarter of a second; only code that looks into a checkpoint pays it
    from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata

METADATA = ".metadata"


def check(directory: Readable, manifest: Manifest, contents: Contents) -> None:
    """Compare the tensors in ``contents`` with the places that DCP's metadata records for their elements.

    Args:
        directory: A published directory.
        manifest: Its manifest.
        contents: Its contents.

    Raises:
        CheckpointError: If a tensor is missing, has holes or overlaps, or lies beyond the end of a file. The message
            names the tensor.
    """
    problem = problem_of(read_dcp_metadata(verification.read_file(directory, METADATA)), manifest, contents)
    if problem is not None:
        raise damaged(directory, problem)


def problem_of(metadata: "Metadata", manifest: Manifest, contents: Contents) -> str | None:
    """Compare like `check`, for a checkpoint that is not published yet, and return what is wrong, or None."""
    expected = {name: what for name, what in contents.tensors().items() if what[0]}
    strange = sorted(expected.keys() ^ metadata.state_dict_metadata.keys())
    if strange:
        where = METADATA if strange[0] in expected else CONTENTS
        return f"{where} does not list the tensor {strange[0]!r}"
    places = {(index.fqn, index.offset): info for index, info in metadata.storage_data.items()}
    for name, (numel, dtype) in expected.items():
        tensor = cast("TensorStorageMetadata", metadata.state_dict_metadata[name])
        problem = _tiling(tensor, numel, dtype)
        for chunk in () if problem else tensor.chunks:
            info = places.get((name, chunk.offsets))
            if info is None or not _lies_in(manifest, info.relative_path, info.offset + info.length):
                problem = f"is not whole in the files that the {MANIFEST} lists"
        if problem:
            return f"the tensor {name!r} {problem}"
    return None


def _tiling(tensor: "TensorStorageMetadata", numel: int, dtype: str) -> str | None:
    """Return what is wrong with the places of the chunks in the tensor, or None."""
    if tuple(tensor.size) != (numel,) or dtype_name(tensor.properties.dtype) != dtype:
        found = f"{list(tensor.size)} {dtype_name(tensor.properties.dtype)}"
        return f"should be {[numel]} {dtype}, but {METADATA} says {found}"
    end = 0
    for start, length in sorted((chunk.offsets[0], chunk.sizes[0]) for chunk in tensor.chunks):
        if start != end:
            return f"has elements {start} to {end} twice" if start < end else f"lacks elements {end} to {start}"
        end = start + length
    if end > numel:
        return f"has elements {numel} to {end} beyond its end"
    return f"lacks elements {end} to {numel}" if end < numel else None


def _lies_in(manifest: Manifest, file: str, end: int) -> bool:
    return file in manifest.files and end <= manifest.files[file].size_bytes
