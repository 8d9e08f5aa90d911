"""Flat tensors in pieces, written and read by PyTorch Distributed Checkpoint (DCP).

[Note: flat tensors]
Every tensor of a sharded checkpoint has one dimension: the elements of a parameter, in the order in which they lie in
memory. In this form a piece of the sharding is a contiguous range; in the parameter's own shape it is often no
rectangular block. Shapes and strides are kept separately (`contents`).
"""

import os
import pickle
import zlib
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import IO, Any, cast

import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed.checkpoint.filesystem import FileSystem
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    StorageMeta,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import LoadPlan, SavePlan, TensorWriteData, WriteItem, WriteItemType
from torch.distributed.checkpoint.planner_helpers import create_read_items_for_chunk_list
from torch.distributed.checkpoint.storage import WriteResult

from lightning_replica._compat.torch import ignore_warnings_of_dcp, read_dcp_metadata
from lightning_replica.checkpoint.coverage import METADATA
from lightning_replica.checkpoint.manifest import FileInfo
from lightning_replica.checkpoint.publish import naming, sync
from lightning_replica.checkpoint.storage import Files, Readable
from lightning_replica.checkpoint.which_storage import files_of
from lightning_replica.devices.host import on_host
from lightning_replica.errors import CheckpointError


@dataclass(frozen=True)
class Chunk:
    """A contiguous range of elements of a flat tensor. See [Note: flat tensors].

    Attributes:
        name: Name of the whole tensor in the checkpoint.
        numel: Number of elements of the whole tensor.
        start: Position of the chunk's first element in the whole tensor.
        data: (elements of the chunk,) the elements to write, or the memory to read into.
    """

    name: str
    numel: int
    start: int
    data: Tensor

    @property
    def place(self) -> ChunkStorageMetadata:
        """The chunk's place in the whole tensor, as a DCP type."""
        return ChunkStorageMetadata(torch.Size([self.start]), self.data.shape)

    @property
    def index(self) -> MetadataIndex:
        """The chunk's key, as a DCP type."""
        return MetadataIndex(self.name, [self.start])


@dataclass(frozen=True)
class Written:
    """What one rank has written.

    Attributes:
        part: Which elements lie where, for `write_metadata`.
        files: Size and checksum of each file, computed from the bytes that were passed to the file system.
    """

    part: bytes
    files: Mapping[str, FileInfo]


def write_chunks(directory: Path, chunks: Sequence[Chunk], rank: int, durable: bool = True) -> Written:
    """Write this rank's chunks into files of its own. Needs no other rank.

    Args:
        directory: The directory to write to.
        chunks: The chunks to write.
        rank: The number in the names of the files.
        durable: Whether to flush the files to the disk.

    Raises:
        CheckpointError: If writing failed.
    """
    writer, planner = _Writer(directory, durable), _SavePlanner(chunks)
    # The writer names files by the position of a plan in the list of all ranks' plans.
    plan = writer.prepare_global_plan([planner.create_local_plan()] * (rank + 1))[rank]
    ignore_warnings_of_dcp()
    try:
        written = writer.write_data(plan, planner).wait()
    except CheckpointError:
        raise
    except Exception as error:  # DCP promises no error type
        raise CheckpointError(f"{directory} could not be written: {type(error).__name__}: {error}") from error
    tensors: dict[str, Any] = {}
    for chunk in chunks:
        new = TensorStorageMetadata(TensorProperties(dtype=chunk.data.dtype), torch.Size([chunk.numel]), [])
        tensors.setdefault(chunk.name, new).chunks.append(chunk.place)
    part = pickle.dumps(Metadata(tensors, storage_data={each.index: each.storage_data for each in written}))
    return Written(part, writer.files)


def write_metadata(directory: Path, parts: Iterable[bytes], durable: bool = True) -> Metadata:
    """Write which elements lie where, in the form that DCP's readers expect, and return it.

    Args:
        directory: The directory of the chunks.
        parts: `Written.part` of each rank.
        durable: Whether to flush the file to the disk.
    """
    whole, results = Metadata({}, storage_data={}), []
    for part in map(read_dcp_metadata, parts):
        for name, tensor in part.state_dict_metadata.items():
            known: Any = whole.state_dict_metadata.setdefault(name, tensor)
            if known is not tensor:
                known.chunks.extend(cast("TensorStorageMetadata", tensor).chunks)
        whole.storage_data.update(part.storage_data)  # `finish` puts it into a copy only, in some versions of torch
        results.append([WriteResult(index, info.length, info) for index, info in part.storage_data.items()])
    _Writer(directory, durable).finish(whole, results)
    return whole


class ChunkReader:
    """Reads chunks, no matter how ranks had divided them for writing. Needs no other rank.

    Args:
        directory: The directory that `write_chunks` wrote.
        files: The names of the files that may be read.
        foreign: Whether another program wrote them.

    Attributes:
        metadata: Which elements lie where, as a DCP type.

    Raises:
        CheckpointError: If the metadata names any other file.
    """

    def __init__(self, directory: Readable, files: Collection[str], foreign: bool = False) -> None:
        self._reader = _Reader(directory, files, foreign)
        self.metadata = self._reader.read_metadata()
        self._reader.set_up_storage_reader(self.metadata, is_coordinator=True)

    def read(self, chunks: Sequence[Chunk]) -> None:
        """Read the elements of ``chunks``, of which no two may have the same tensor and start.

        Raises:
            CheckpointError: If a chunk is not complete.
        """
        self._read(_LoadPlanner(chunks), {})

    def read_whole(self, tensors: Mapping[str, Tensor]) -> None:
        """Read whole tensors of any number of dimensions into the memory of ``tensors``, by their names."""
        self._read(dcp.DefaultLoadPlanner(flatten_state_dict=False, flatten_sharded_tensors=False), dict(tensors))

    def _read(self, planner: dcp.DefaultLoadPlanner, tensors: dict[str, Any]) -> None:
        planner.set_up_planner(tensors, self.metadata, is_coordinator=True)
        self._reader.read_data(self._reader.prepare_local_plan(planner.create_local_plan()), planner).wait()


class _Writer(dcp.FileSystemWriter):
    def __init__(self, directory: Path, durable: bool) -> None:
        super().__init__(directory, sync_files=durable)
        self.files: dict[str, FileInfo] = {}
        self.fs = _Checked(self.files)

    def storage_meta(self) -> StorageMeta:
        return StorageMeta()  # without the path, which changes on publication

    def write_data(self, plan: SavePlan, planner: Any) -> Any:
        with naming(Path(self.path) / f"{plan.storage_data.prefix}0.distcp"):
            return super().write_data(plan, planner)

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        with naming(Path(self.path) / METADATA):
            super().finish(metadata, results)
            if self.sync_files:
                sync(Path(self.path) / METADATA)  # DCP calls fsync before it writes the last bytes


class _Checked(FileSystem):
    """The file system that DCP writes with.

    Checksums are computed from the bytes that DCP writes, so a disk that returns other bytes is detected.
    """

    def __init__(self, files: dict[str, FileInfo]) -> None:
        self._files = files

    @contextmanager
    def create_stream(self, path: str | os.PathLike[str], mode: str) -> Iterator[Any]:
        with Path(path).open(mode) as stream:
            checked = _CheckedStream(stream)
            yield checked
        self._files[Path(path).name] = FileInfo(checked.size_bytes, checked.crc32)


class _CheckedStream:
    def __init__(self, stream: IO[Any]) -> None:
        self._stream, self.size_bytes, self.crc32 = stream, 0, 0

    def write(self, data: Any) -> int:
        self.size_bytes += memoryview(data).nbytes
        self.crc32 = zlib.crc32(data, self.crc32)
        return self._stream.write(data)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


class _Reader(dcp.FileSystemReader):
    def __init__(self, directory: Readable, files: Collection[str], foreign: bool) -> None:
        super().__init__("")
        self._foreign = foreign
        self._found, self._files = files_of(directory), files
        self.fs = _Pieces(self._found)

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        metadata = read_dcp_metadata(self._found.read(METADATA), self._foreign)
        foreign = {info.relative_path for info in metadata.storage_data.values()} - set(self._files)
        if foreign:
            raise CheckpointError(
                f"The checkpoint {self._found} cannot be used: it refers to {min(foreign)!r}, which its manifest"
                " does not list. Use another checkpoint."
            )
        return metadata

    def prepare_local_plan(self, plan: LoadPlan) -> LoadPlan:
        """Sort the reads by their offset in a file, because a store returns large blocks at a time."""
        return replace(plan, items=sorted(plan.items, key=lambda item: self.storage_data[item.storage_index].offset))


class _Pieces(FileSystem):
    """The file system that DCP reads with."""

    def __init__(self, files: Files) -> None:
        self._files = files

    @contextmanager
    def create_stream(self, path: str | os.PathLike[str], mode: str) -> Iterator[Any]:
        with self._files.open(os.fspath(path)) as stream:
            yield stream


class _SavePlanner(dcp.DefaultSavePlanner):
    def __init__(self, chunks: Sequence[Chunk]) -> None:
        super().__init__(flatten_state_dict=False, flatten_sharded_tensors=False)
        self._chunks = {chunk.index: chunk for chunk in chunks}

    def create_local_plan(self) -> SavePlan:
        self.plan = SavePlan(
            [
                WriteItem(
                    index=index,
                    type=WriteItemType.SHARD,
                    tensor_data=TensorWriteData(
                        chunk.place, TensorProperties(dtype=chunk.data.dtype), torch.Size([chunk.numel])
                    ),
                )
                for index, chunk in self._chunks.items()
            ]
        )
        return self.plan

    def lookup_object(self, index: MetadataIndex) -> Tensor:
        return _alone(self._chunks[index].data)


def _alone(data: Tensor) -> Tensor:
    """Return a tensor with the same memory that is not a view.

    DCP copies views, and keeps the copies until the file is done. Tensors on a device are returned unchanged, as DCP
    must copy them.
    """
    if not on_host(data) or not data.is_contiguous() or not data.numel():
        return data
    return torch.frombuffer(data.detach().view(torch.uint8).numpy(), dtype=data.dtype)


class _LoadPlanner(dcp.DefaultLoadPlanner):
    def __init__(self, chunks: Sequence[Chunk]) -> None:
        super().__init__(flatten_state_dict=False, flatten_sharded_tensors=False)
        self._chunks = {chunk.index: chunk for chunk in chunks}

    def create_local_plan(self) -> LoadPlan:
        items = []
        for chunk in self._chunks.values():
            stored = self.metadata.state_dict_metadata.get(chunk.name) if self.metadata is not None else None
            if not isinstance(stored, TensorStorageMetadata):
                raise CheckpointError(f"The checkpoint does not hold tensor {chunk.name!r}, which its contents list.")
            found = create_read_items_for_chunk_list(chunk.name, stored, [chunk.place])
            if sum(item.lengths.numel() for item in found) != chunk.data.numel():
                raise CheckpointError(f"The checkpoint holds only part of the tensor {chunk.name!r}.")
            items += found
        return LoadPlan(items)

    def lookup_tensor(self, index: MetadataIndex) -> Tensor:
        return self._chunks[index].data
