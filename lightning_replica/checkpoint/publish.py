"""A directory of files that is there as a whole or not at all, and that knows when it was damaged.

Files are written to ``<path>.tmp`` and brought to the disk, a manifest with their sizes and checksums comes last, then
the directory is renamed to ``<path>``. If there is one already it is first renamed to ``<path>.old``: a crash between
the two renames leaves that, complete, and `published` finds it.
"""

import json
import os
import shutil
import zlib
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from importlib import metadata
from pathlib import Path
from typing import Any

from lightning_replica.errors import CheckpointError
from lightning_replica.points import reach

MANIFEST = "manifest.json"
FORMAT = 1
_PACKAGES = ("lightning-replica", "lightning", "torch")
_READ_BYTES = 1 << 20


@dataclass(frozen=True)
class FileInfo:
    """What a file must look like: its size, and the CRC-32 of all of it."""

    size_bytes: int
    crc32: int

    @classmethod
    def of(cls, file: Path) -> "FileInfo":
        """Reads the file, a little at a time."""
        size, crc = 0, 0
        with file.open("rb") as stream:
            while block := stream.read(_READ_BYTES):
                size, crc = size + len(block), zlib.crc32(block, crc)
        return cls(size, crc)


def _versions() -> dict[str, str]:
    found = {}
    for package in _PACKAGES:
        try:
            found[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            found[package] = "not installed"
    return found


@dataclass(frozen=True)
class Manifest:
    """What a published directory holds.

    Attributes:
        files: Every file but the manifest itself, by name.
        world_size: Ranks of the run that wrote it, N.
        replicas: Its replicas, R.
        partition: How its buckets were cut.
        versions: Versions of the packages that matter.
        format: Version of this layout on disk.
    """

    files: Mapping[str, FileInfo]
    world_size: int
    replicas: int
    partition: str
    versions: Mapping[str, str] = field(default_factory=_versions)
    format: int = FORMAT


def staging(path: Path) -> Path:
    """Where ``path`` is written before it is published."""
    return path.with_name(path.name + ".tmp")


def stage(path: Path) -> Path:
    """Makes the empty directory to write into; what an earlier crash left there is gone."""
    directory = staging(path)
    _remove(directory)
    directory.mkdir(parents=True)
    return directory


def publish(path: Path, manifest: Manifest) -> None:
    """Makes what was staged appear under ``path``, in place of what was there.

    Every file of ``manifest`` must have been brought to the disk already (`write_file` does).
    """
    staged, aside = staging(path), _aside(path)
    write_file(staged / MANIFEST, json.dumps(asdict(manifest), indent=1).encode())
    _sync(staged)
    if os.path.lexists(path):
        _remove(aside)
        path.rename(aside)
        reach("publish")
    staged.rename(path)
    _sync(path.parent)
    _remove(aside)


def published(path: Path) -> Path:
    """The directory to read for ``path``: its predecessor, if a crash came while that was being replaced.

    Raises:
        CheckpointError: If there is none.
    """
    for directory in (path, _aside(path)):
        if directory.is_dir():
            return directory
    unfinished = f" {staging(path)} was never finished; it is not used." if staging(path).exists() else ""
    raise CheckpointError(f"There is no sharded checkpoint at {path}.{unfinished}")


def verify(path: Path, share: tuple[int, int] = (0, 1)) -> Manifest:
    """Checks a published directory.

    Args:
        path: The directory.
        share: (i, n): of the checksums, only the i-th of every n files'; n ranks share the work. Everything else is
            checked in any case.

    Raises:
        CheckpointError: If a file is missing, has another size or checksum, or is not in the directory; if there is
            no manifest, or one that cannot be read.
    """
    directory = published(path)
    manifest = _read_manifest(directory)
    for name, expected in manifest.files.items():
        size = _regular_file(directory, name).stat().st_size
        if size != expected.size_bytes:
            raise _bad(directory, f"{name} has {size} bytes, and was written with {expected.size_bytes}")
    for name in sorted(manifest.files)[share[0] :: share[1]]:
        if FileInfo.of(directory / name) != manifest.files[name]:
            raise _bad(directory, f"the checksum of {name} differs from what was written")
    return manifest


def read_file(directory: Path, name: str) -> bytes:
    """The content of one file of a published directory, checked like all the others in `verify`.

    Raises:
        CheckpointError: If it is not what was written.
    """
    expected = _read_manifest(directory).files.get(name)
    if expected is None:
        raise _bad(directory, f"its {MANIFEST} does not list {name}")
    content = _regular_file(directory, name).read_bytes()
    if FileInfo(len(content), zlib.crc32(content)) != expected:
        raise _bad(directory, f"size or checksum of {name} differs from what was written")
    return content


def write_file(file: Path, content: bytes) -> None:
    """Writes a file and brings it to the disk."""
    with file.open("wb") as stream:
        stream.write(content)
        stream.flush()
        os.fsync(stream.fileno())


def _read_manifest(directory: Path) -> Manifest:
    if not os.path.lexists(directory / MANIFEST):
        raise _bad(directory, f"it has no {MANIFEST}, so it was not written as a whole, or by something else")
    text = _regular_file(directory, MANIFEST).read_bytes()
    try:
        read: dict[str, Any] = json.loads(text)
        written_by = read["format"]
        if written_by == FORMAT:
            return Manifest(**{**read, "files": {name: FileInfo(**info) for name, info in read["files"].items()}})
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        raise _bad(directory, f"its {MANIFEST} cannot be read ({type(error).__name__}: {error})") from error
    raise CheckpointError(
        f"The checkpoint {directory} has format {written_by!r}, and this version of lightning_replica reads format"
        f" {FORMAT}. Load it with the version that wrote it: {read.get('versions')}."
    )


def _regular_file(directory: Path, name: str) -> Path:
    """The file ``name``, if it is one, and lies in the directory itself."""
    if name != Path(name).name or "\0" in name:
        raise _bad(directory, f"its {MANIFEST} lists {name!r}, which is not a file name inside the directory")
    file = directory / name
    if file.is_symlink():
        raise _bad(directory, f"{name} is a symbolic link")
    if not file.is_file():
        raise _bad(directory, f"{name} is missing")
    return file


def _bad(directory: Path, what: str) -> CheckpointError:
    return CheckpointError(f"The checkpoint {directory} cannot be used: {what}. Use another checkpoint.")


def _aside(path: Path) -> Path:
    return path.with_name(path.name + ".old")


def _remove(path: Path) -> None:
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


def _sync(directory: Path) -> None:
    descriptor = os.open(directory, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
