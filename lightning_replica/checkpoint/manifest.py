"""The manifest of a published directory: its files, and which training wrote it, where, when and why."""

import json
import re
import time
import zlib
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field
from importlib import metadata
from pathlib import Path
from typing import IO, Any

from lightning_replica._compat.packages import chosen

MANIFEST = "manifest.json"
# The names of all files that a save writes; see `sharded`.
WRITTEN = re.compile(r"plain\.pt|contents\.pt|manifest\.json|\.metadata(\.tmp)?|__\d+_\d+\.distcp")
FORMAT = 3
READABLE = (2, FORMAT)
_READ_BYTES = 1 << 20


@dataclass(frozen=True)
class FileInfo:
    """The size that a file must have, and the CRC-32 of its whole content."""

    size_bytes: int
    crc32: int

    @classmethod
    def of(cls, file: Path) -> "FileInfo":
        """Return size and checksum of a file. It is read in blocks."""
        with file.open("rb") as stream:
            return cls.of_stream(stream)

    @classmethod
    def of_bytes(cls, content: bytes) -> "FileInfo":
        """Return size and checksum of a file with this ``content``."""
        return cls(len(content), zlib.crc32(content))

    @classmethod
    def of_stream(cls, stream: IO[bytes]) -> "FileInfo":
        """Return size and checksum of the rest of an open file. It is read in blocks."""
        size, crc = 0, 0
        while block := stream.read(_READ_BYTES):
            size, crc = size + len(block), zlib.crc32(block, crc)
        return cls(size, crc)


def _versions() -> dict[str, str]:
    found = {}
    for package in ("lightning-replica", chosen().distribution, "torch"):
        try:
            found[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            found[package] = "not installed"
    return found


@dataclass(frozen=True)
class Lineage:
    """Which training wrote a checkpoint, among those that have written to its directory.

    Attributes:
        run: The number of the run, 1 for the first one in the directory; 0 if unknown.
        fit: The number of the fit in the run's script, 1 for the first one.
        after: The runs that this one goes on from, each with the step at which the next one left it.
    """

    run: int = 0
    fit: int = 1
    after: tuple[tuple[int, int], ...] = ()

    @classmethod
    def of_plain(cls, read: Mapping[str, Any]) -> "Lineage":
        """Build a lineage from plain data."""
        return cls(read["run"], read["fit"], tuple((run, step) for run, step in read["after"]))

    def includes(self, other: "Lineage", step: int | None) -> bool:
        """Return whether a checkpoint of ``other`` at ``step`` is of this fit, or of what this fit goes on from."""
        own = other.run == self.run or any(run == other.run and (step or 0) <= left for run, left in self.after)
        return own and other.fit == self.fit


@dataclass(frozen=True)
class Provenance:
    """What a checkpoint says of itself.

    Attributes:
        step: Optimizer steps in it. Readers use it to find the newer of two checkpoints.
        written_for: Why it is written, for people who look at it later: "periodic", "gasp", "planned".
        lineage: Which training writes it.
    """

    step: int | None = None
    written_for: str = "periodic"
    lineage: Lineage = Lineage()


@dataclass(frozen=True)
class Manifest:
    """What a published directory holds.

    Attributes:
        files: Every file but the manifest itself, by name.
        world_size: Number of ranks of the run that wrote it, N.
        replicas: Number of replicas of that run, R.
        partition: How that run cut its buckets.
        step: Optimizer steps in it; None if the caller gave none.
        written_for: Why it was written, such as "periodic", "gasp" or "planned".
        writers: The ranks that wrote it, each with the name of its host.
        saved_ns: When the save began, in nanoseconds since 1970 by the clock of the rank that published it.
        versions: Versions of this package, lightning and torch.
        lineage: Which training wrote it.
        format: Version of this layout on disk. Format 2 has no lineage.
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
    lineage: Lineage = Lineage()
    format: int = FORMAT

    @property
    def age(self) -> tuple[int, ...]:
        """The sort key of a directory's checkpoints, higher for newer ones.

        A run that resumes from an older step gives up what was written after it. The time comes last, as clocks differ.
        """
        return (self.lineage.run, self.lineage.fit, -1 if self.step is None else self.step, self.saved_ns)

    @property
    def size_bytes(self) -> int:
        """The size of all files together, without the manifest itself."""
        return sum(info.size_bytes for info in self.files.values())

    def as_bytes(self) -> bytes:
        """Return the content of the manifest file."""
        return json.dumps(self.as_plain(), indent=1).encode()

    def as_plain(self) -> dict[str, Any]:
        """Return the manifest as plain data for JSON, with a checksum over itself."""
        content = json.loads(json.dumps(asdict(self)))  # keys become strings, as they will be read
        return {**content, "crc32": _crc(content)}

    @classmethod
    def of_plain(cls, read: Mapping[str, Any]) -> "Manifest":
        """Build a manifest from what `as_plain` returned.

        Raises:
            ValueError: If ``read`` is not what was written; also KeyError, TypeError or AttributeError.
        """
        content = {key: value for key, value in read.items() if key != "crc32"}
        if read["crc32"] != _crc(content):
            raise ValueError("its checksum differs from what was written")
        if content["format"] == 2:
            content["lineage"] = asdict(Lineage())
        _check_types(content)
        files = {name: FileInfo(**info) for name, info in content["files"].items()}
        writers = {int(rank): host for rank, host in content["writers"].items()}
        lineage = Lineage.of_plain(content["lineage"])
        return cls(**{**content, "files": files, "writers": writers, "lineage": lineage})


def parse(written: bytes) -> Any:
    """Parse the content of a manifest file, for `Manifest.of_plain`.

    Raises:
        ValueError: If it is not JSON, or has a key twice; also RecursionError.
    """
    return json.loads(written, object_pairs_hook=_without_doubles, parse_constant=_refuse_constant)


def _without_doubles(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) != len(pairs):
        raise ValueError("it has a key twice")
    return found


def _refuse_constant(name: str) -> Any:
    raise ValueError(f"{name} is not a valid number")


def _whole(least: int, below: int) -> Callable[[Any], bool]:
    return lambda value: type(value) is int and least <= value < below


def _is_text(value: Any) -> bool:
    return isinstance(value, str) and value.isprintable()


def _are_texts(value: Any) -> bool:
    return isinstance(value, dict) and all(_is_text(each) for pair in value.items() for each in pair)


def _are_files(value: Any) -> bool:
    return isinstance(value, dict) and all(
        _is_text(name) and isinstance(info, dict) and info.keys() == _INFO.keys() and _have_types(info, _INFO)
        for name, info in value.items()
    )


def _is_lineage(value: Any) -> bool:
    return isinstance(value, dict) and value.keys() == _LINEAGE.keys() and _have_types(value, _LINEAGE)


def _are_runs(value: Any) -> bool:
    whole = _whole(0, _MOST)
    return isinstance(value, list | tuple) and all(
        isinstance(each, list | tuple) and len(each) == 2 and all(map(whole, each)) for each in value
    )


def _have_types(content: Mapping[str, Any], types: Mapping[str, Callable[[Any], bool]]) -> bool:
    return all(fits(content[name]) for name, fits in types.items())


_MOST = 2**63
_INFO = {"size_bytes": _whole(0, _MOST), "crc32": _whole(0, 2**32)}
_LINEAGE = {"run": _whole(0, _MOST), "fit": _whole(1, _MOST), "after": _are_runs}
_TYPES: dict[str, Callable[[Any], bool]] = {
    "files": _are_files,
    "world_size": _whole(1, _MOST),
    "replicas": _whole(1, _MOST),
    "partition": _is_text,
    "step": lambda value: value is None or _whole(0, _MOST)(value),
    "written_for": _is_text,
    "writers": lambda value: _are_texts(value) and all(rank.isdecimal() for rank in value),
    "saved_ns": _whole(0, _MOST),
    "versions": _are_texts,
    "lineage": _is_lineage,
    "format": _whole(0, _MOST),
}


def _check_types(content: Mapping[str, Any]) -> None:
    """Raise ValueError unless every entry has the type and range that a save writes: readers compare and show them."""
    for name, fits in _TYPES.items():
        if not fits(content[name]):
            raise ValueError(f"its {name} is {content[name]!r:.60}, which is not valid")


def _crc(content: Mapping[str, Any]) -> int:
    return zlib.crc32(json.dumps(content, sort_keys=True).encode())
