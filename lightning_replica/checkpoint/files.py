"""The files of one directory, on a file system or in a store of objects."""

import os
from collections.abc import Mapping
from contextlib import AbstractContextManager
from functools import cached_property
from pathlib import Path
from typing import IO, TypeAlias

from lightning_replica.checkpoint import store
from lightning_replica.checkpoint.attempts import Attempt
from lightning_replica.checkpoint.location import Location, Url, by_kind
from lightning_replica.checkpoint.manifest import MANIFEST
from lightning_replica.errors import CheckpointError


class Files:
    """The files of a directory, by name. The manifest and the listing of a store cannot change and are read once.

    Attributes:
        directory: The directory.
    """

    directory: Location

    def __str__(self) -> str:
        return str(self.directory)

    def has(self, name: str) -> bool:
        """Return whether the directory has an entry of that name."""
        raise NotImplementedError

    def size(self, name: str) -> int:
        """Return the size of a file in bytes.

        Raises:
            CheckpointError: If it is missing, not a regular file, or not directly in the directory.
        """
        raise NotImplementedError

    def open(self, name: str) -> AbstractContextManager[IO[bytes]]:
        """Open a file for reading at any position.

        Raises:
            CheckpointError: As `size` does.
        """
        raise NotImplementedError

    def read(self, name: str) -> bytes:
        """Read a whole file.

        Raises:
            CheckpointError: As `size` does, or if a store cannot return the file.
        """
        with self.open(name) as stream:
            return stream.read()

    @cached_property
    def manifest(self) -> bytes:
        """The content of the manifest file."""
        return self.read(MANIFEST)


Readable: TypeAlias = Location | Files


def files_of(directory: Readable) -> Files:
    """Return the files directly in ``directory``."""
    if isinstance(directory, Files):
        return directory
    return by_kind(directory, _Local, lambda url: _Stored(url, store.objects(url)))


def is_file(path: Location) -> bool:
    """Return whether ``path`` is a file or an object of a store, and not a directory."""
    return by_kind(path, Path.is_file, store.is_object)


def opened(path: Location) -> AbstractContextManager[IO[bytes]]:
    """Open a file, or an object of a store, for reading.

    Raises:
        OSError: If there is no such file; CheckpointError where it is an object.
    """
    return by_kind(path, lambda file: file.open("rb"), store.opened)


def files_of_attempt(attempt: Attempt) -> Files:
    """Return the files of an attempt without listing the store again."""
    return _Stored(attempt.url, attempt.sizes)


def damaged(directory: Readable, what: str) -> CheckpointError:
    """Return the error for a checkpoint (a directory or a file) that cannot be used."""
    return CheckpointError(f"The checkpoint {directory} cannot be used: {what}. Use another checkpoint.")


class _Local(Files):
    def __init__(self, directory: Path) -> None:
        self.directory: Path = directory

    def has(self, name: str) -> bool:
        return os.path.lexists(self.directory / name)

    def size(self, name: str) -> int:
        return self._file(name).stat().st_size

    def open(self, name: str) -> AbstractContextManager[IO[bytes]]:
        return self._file(name).open("rb")

    def _file(self, name: str) -> Path:
        if name != Path(name).name or "\0" in name:
            raise damaged(self, f"its {MANIFEST} lists {name!r}, which is not a file name inside the directory")
        file = self.directory / name
        if file.is_symlink():
            raise damaged(self, f"{name} is a symbolic link")
        if not file.is_file():
            raise damaged(self, f"{name} is missing")
        return file


class _Stored(Files):
    def __init__(self, directory: Url, sizes: Mapping[str, int]) -> None:
        self.directory: Url = directory
        self._sizes = sizes

    def has(self, name: str) -> bool:
        return name in self._sizes

    def size(self, name: str) -> int:
        return self._sizes[self._listed(name)]

    def open(self, name: str) -> AbstractContextManager[IO[bytes]]:
        return store.opened(self.directory / self._listed(name))

    def read(self, name: str) -> bytes:
        content = store.read(self.directory / self._listed(name))
        if content is None:
            raise damaged(self, f"{name} is gone")
        return content

    def _listed(self, name: str) -> str:
        """Return ``name`` if the store listed it: such a name cannot lead outside of the directory."""
        if name not in self._sizes or "/" in name:
            raise damaged(self, f"{name} is missing")
        return name
