"""Checkpoints on a file system: directories that all ranks write into, and that are renamed on publication."""

# ruff: noqa: D102 (`storage` says what the methods do)

import os
from collections.abc import Sequence
from contextlib import AbstractContextManager
from os.path import exists  # unlike `Path.exists`, False for what may not be looked at: `lost+found`
from pathlib import Path
from typing import IO

from lightning_replica.checkpoint import lease, publish
from lightning_replica.checkpoint.location import Location
from lightning_replica.checkpoint.manifest import MANIFEST, WRITTEN, Manifest
from lightning_replica.checkpoint.storage import (
    FAILURES,
    PROBE,
    STEP,
    TRACKER,
    Destination,
    Files,
    Storage,
    damaged,
    nothing_at,
    plain_name,
)
from lightning_replica.errors import CheckpointError, ConfigurationError


class Disk(Storage):
    """A path on a file system. See `publish`."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def is_file(self) -> bool:
        return self._path.is_file()

    def exists(self) -> bool:
        return self._path.exists()

    def open(self) -> AbstractContextManager[IO[bytes]]:
        return self._path.open("rb")

    def replace(self, content: bytes) -> None:
        with publish.naming(self._path):
            publish.make_directory(self._path.parent)
        publish.replace_file(self._path, content)

    def may_be_sharded(self) -> bool:
        return self._path.is_dir() or publish.aside(self._path).is_dir()

    def holds_others(self) -> bool:
        return self._path.is_dir() and not exists(self._path / MANIFEST)

    def files(self) -> Files:
        return _FilesOnDisk(self._path)

    def candidates(self) -> list[Files]:
        """Return the files of the checkpoint, or of the former one if a crash interrupted its replacement."""
        for directory in (self._path, publish.aside(self._path)):
            if directory.is_dir():
                return [_FilesOnDisk(directory)]
        entries = self._path.parent.iterdir() if self._path.parent.is_dir() else ()
        unfinished = [entry.name for entry in entries if publish.temporary_of(entry.name) == self._path.name]
        raise nothing_at(self._path, f"{min(unfinished)} beside it" if unfinished else "")

    def destination(self) -> Destination:
        return _DirectoryOfAll(self._path)

    def check_installed(self) -> None:
        pass

    def names(self) -> list[str]:
        entries = sorted(self._path.iterdir()) if self._path.is_dir() else ()
        return [
            entry.name
            for entry in entries
            if not publish.temporary_of(entry.name) and (STEP.fullmatch(entry.name) or exists(entry / MANIFEST))
        ]

    def child(self, name: str) -> Path:
        path = self._path / plain_name(self._path, name)
        if path.is_symlink():
            raise CheckpointError(f"{path} is a symbolic link, which is not followed. Name its target instead.")
        return path

    def prepare(self) -> list[str]:
        publish.make_directory(self._path)
        entries = list(self._path.iterdir())
        for entry in entries:
            _refuse_foreign(entry)
        probe = self._path / PROBE
        publish.write_file(probe, b"can it be written?\n")
        probe.unlink()
        for entry in entries:
            if publish.temporary_of(entry.name) and _is_ours(entry):
                publish.discard(entry)
        return [entry.stem for entry in entries if entry.suffix == ".old" and STEP.fullmatch(entry.stem)]

    def settle(self, name: str, whole: Location | None) -> None:
        path = self._path / name
        former = publish.aside(path)
        if not path.exists():
            publish.restore(former, path)
        elif whole is not None:  # otherwise the former one may be the only whole one
            publish.discard(former)

    def read(self, name: str) -> bytes | None:
        file = self._path / name
        return file.read_bytes() if file.is_file() else None

    def write(self, name: str, content: bytes) -> None:
        publish.replace_file(self._path / name, content)

    def remove(self, name: str) -> None:
        (self._path / name).unlink(missing_ok=True)

    def discard(self, name: str) -> None:
        publish.discard(self._path / name)


class _FilesOnDisk(Files):
    def __init__(self, directory: Path) -> None:
        self._directory = directory

    @property
    def directory(self) -> Path:
        return self._directory

    def has(self, name: str) -> bool:
        return os.path.lexists(self._directory / name)

    def size(self, name: str) -> int:
        return self._file(name).stat().st_size

    def open(self, name: str) -> AbstractContextManager[IO[bytes]]:
        return self._file(name).open("rb")

    def _file(self, name: str) -> Path:
        if name != Path(name).name or "\0" in name:
            raise damaged(self, f"its {MANIFEST} lists {name!r}, which is not a file name inside the directory")
        file = self._directory / name
        if file.is_symlink():
            raise damaged(self, f"{name} is a symbolic link")
        if not file.is_file():
            raise damaged(self, f"{name} is missing")
        return file


class _DirectoryOfAll(Destination):
    """All ranks write into one directory, which is renamed on publication."""

    def __init__(self, path: Path) -> None:
        super().__init__()
        self._path = path
        self._directory = path  # until `join`

    @property
    def directory(self) -> Path:
        return self._directory

    def begin(self, first: bool) -> str:
        if not first:
            return ""
        try:
            lease.keep(self._path.parent)
        except (OSError, ConfigurationError) as error:
            raise CheckpointError(str(error)) from error
        return str(self._stack.enter_context(publish.staged(self._path)))

    def join(self, directory: str) -> None:
        self._directory = Path(directory)

    def deliver(self, files: Sequence[Path]) -> None:
        """Leave the files, which are in place."""

    def publish(self, manifest: Manifest) -> None:
        publish.publish(self._directory, self._path, manifest)


def _refuse_foreign(entry: Path) -> None:
    """Raise if ``entry`` has a name that a run replaces or removes, but a run did not write it."""
    if entry.name in (TRACKER, FAILURES, PROBE):
        ours = entry.is_file()
    elif STEP.fullmatch(entry.name.removesuffix(".old")):
        ours = entry.is_dir()
        publish.refuse_foreign(entry)
    else:
        return
    if entry.is_symlink() or not ours:
        raise CheckpointError(f"{entry} has a name that a run uses, but something else wrote it. Move it away.")


def _is_ours(temporary: Path) -> bool:
    """Return whether ``temporary`` is a directory that holds only files that a save writes."""
    if temporary.is_symlink() or not temporary.is_dir():
        return False
    return all(WRITTEN.fullmatch(entry.name) and not entry.is_dir() for entry in temporary.iterdir())
