"""What a published directory says of itself: its files, and which training wrote it, where, when and why."""

import json
import re
import time
import zlib
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from importlib import metadata
from pathlib import Path
from typing import IO, Any

MANIFEST = "manifest.json"
# The names of all files that a save writes; see `sharded`.
WRITTEN = re.compile(r"plain\.pt|contents\.pt|manifest\.json|\.metadata(\.tmp)?|__\d+_\d+\.distcp")
FORMAT = 2
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
        with file.open("rb") as stream:
            return cls.of_stream(stream)

    @classmethod
    def of_stream(cls, stream: IO[bytes]) -> "FileInfo":
        """Likewise, to the end of what is open."""
        size, crc = 0, 0
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
        step: Optimizer steps in it; None where the caller did not say.
        written_for: Why it was written, such as "periodic", "gasp" or "planned".
        writers: The ranks that wrote it, each with the name of its host.
        saved_ns: When, in nanoseconds since 1970 by the clock of the rank that published it.
        versions: Versions of the packages that matter.
        format: Version of this layout on disk.
    """

    files: Mapping[str, FileInfo]
    world_size: int
    replicas: int
    partition: str
    step: int | None = None
    written_for: str = "periodic"
    writers: Mapping[int, str] = field(default_factory=dict)
    saved_ns: int = field(default_factory=time.time_ns)
    versions: Mapping[str, str] = field(default_factory=_versions)
    format: int = FORMAT

    @property
    def age(self) -> tuple[int, int]:
        """Of two checkpoints of a run the newer has more: steps first, of which clocks know nothing."""
        return (-1 if self.step is None else self.step, self.saved_ns)

    @property
    def size_bytes(self) -> int:
        """Of all files together."""
        return sum(info.size_bytes for info in self.files.values())

    def as_bytes(self) -> bytes:
        """What is written."""
        return json.dumps(self.as_plain(), indent=1).encode()

    def as_plain(self) -> dict[str, Any]:
        """For JSON, with a checksum of its own."""
        content = json.loads(json.dumps(asdict(self)))  # keys become strings, as they will be read
        return {**content, "crc32": _crc(content)}

    @classmethod
    def of_plain(cls, read: Mapping[str, Any]) -> "Manifest":
        """The inverse of `as_plain`.

        Raises:
            ValueError: If it is not what was written; also KeyError, TypeError or AttributeError.
        """
        content = {key: value for key, value in read.items() if key != "crc32"}
        if read["crc32"] != _crc(content):
            raise ValueError("its checksum differs from what was written")
        files = {name: FileInfo(**info) for name, info in content["files"].items()}
        writers = {int(rank): host for rank, host in content["writers"].items()}
        return cls(**{**content, "files": files, "writers": writers})


def _crc(content: Mapping[str, Any]) -> int:
    return zlib.crc32(json.dumps(content, sort_keys=True).encode())
