"""What a run does differently with its directory of checkpoints on a file system and in a store."""

import re
from os.path import exists  # unlike `Path.exists`, False for what may not be looked at: `lost+found`
from pathlib import Path
from typing import Protocol

from lightning_replica.checkpoint import publish, store
from lightning_replica.checkpoint.attempts import attempts_at, may_have
from lightning_replica.checkpoint.files import Files, Readable
from lightning_replica.checkpoint.location import Location, Url, by_kind
from lightning_replica.checkpoint.manifest import MANIFEST, WRITTEN
from lightning_replica.errors import CheckpointError

TRACKER = "latest"
FAILURES = "failures.json"  # see `failures`
STEP = re.compile(r"step_\d{8,}")
_PROBE = f"{TRACKER}.tmp"


class Storage(Protocol):
    """What `directory.CheckpointDirectory` needs of a place. All names are entries directly in the directory."""

    def names(self) -> list[str]:
        """Return the names of all checkpoints, damaged ones included, in alphabetical order.

        Raises:
            CheckpointError: If a store cannot be listed.
        """

    def child(self, name: str) -> Readable:
        """Return the place to read the checkpoint ``name`` from.

        Raises:
            CheckpointError: If ``name`` leads elsewhere, or a store has no such checkpoint.
        """

    def prepare(self) -> list[str]:
        """Make sure that the directory can be written to, and remove what earlier crashed runs left unfinished.

        Returns:
            The names of the checkpoints whose replacement a crash interrupted, for `settle`.

        Raises:
            OSError: If it cannot be written to; also CheckpointError.
        """

    def settle(self, name: str, whole: bool) -> None:
        """Finish the interrupted replacement of a checkpoint.

        Args:
            name: A name that `prepare` returned.
            whole: Whether the version that readers find now is whole. If not, no version is removed.
        """

    def read(self, name: str) -> bytes | None:
        """Return the content of a file beside the checkpoints; None if there is no such file."""

    def write(self, name: str, content: bytes) -> None:
        """Replace such a file atomically."""

    def remove(self, name: str) -> None:
        """Remove such a file, if there is one.

        Raises:
            OSError: If that fails; also CheckpointError.
        """

    def discard(self, name: str) -> None:
        """Remove a checkpoint."""


def storage_of(path: Location) -> Storage:
    """Return the storage for the directory ``path``."""
    return by_kind(path, _OnDisk, _InStore)


class _OnDisk:
    """A directory on a file system. See `publish`."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def names(self) -> list[str]:
        entries = sorted(self._path.iterdir()) if self._path.is_dir() else ()
        return [
            entry.name
            for entry in entries
            if not publish.temporary_of(entry.name) and (STEP.fullmatch(entry.name) or exists(entry / MANIFEST))
        ]

    def child(self, name: str) -> Path:
        path = self._path / _plain(self._path, name)
        if path.is_symlink():
            raise CheckpointError(f"{path} is a symbolic link, which is not followed. Name its target instead.")
        return path

    def prepare(self) -> list[str]:
        publish.make_directory(self._path)
        entries = list(self._path.iterdir())
        for entry in entries:
            _refuse_foreign(entry)
        probe = self._path / _PROBE
        publish.write_file(probe, b"can it be written?\n")
        probe.unlink()
        for entry in entries:
            if publish.temporary_of(entry.name) and _is_ours(entry):
                publish.discard(entry)
        return [entry.stem for entry in entries if entry.suffix == ".old" and STEP.fullmatch(entry.stem)]

    def settle(self, name: str, whole: bool) -> None:
        path = self._path / name
        former = publish.aside(path)
        if not path.exists():
            publish.restore(former, path)
        elif whole:  # otherwise the former one may be the only whole one
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


class _InStore:
    """A directory in a store. See [Note: attempts] in `attempts`."""

    def __init__(self, url: Url) -> None:
        self._url = url

    def names(self) -> list[str]:
        return [name for name in self._names() if any(each.committed for each in attempts_at(self._url / name))]

    def child(self, name: str) -> Files:
        return publish.published(self._url / _plain(self._url, name))

    def prepare(self) -> list[str]:
        store.write(self._url / _PROBE, b"can it be written?\n")
        store.remove([self._url / _PROBE])
        halves = []
        for name in self._names():
            found = attempts_at(self._url / name)
            for attempt in found:
                if attempt.given_up:
                    attempt.remove()
            if len([attempt for attempt in found if attempt.committed]) > 1:
                halves.append(name)
        return halves

    def settle(self, name: str, whole: bool) -> None:
        newest = publish.published(self._url / name).directory
        for attempt in attempts_at(self._url / name) if whole else ():
            if attempt.committed and attempt.url != newest:
                attempt.remove()

    def read(self, name: str) -> bytes | None:
        return store.read(self._url / name)

    def write(self, name: str, content: bytes) -> None:
        store.write(self._url / name, content)

    def remove(self, name: str) -> None:
        if store.is_object(self._url / name):
            store.remove([self._url / name])

    def discard(self, name: str) -> None:
        for attempt in attempts_at(self._url / name):
            if attempt.committed:
                attempt.remove()

    def _names(self) -> list[str]:
        """Return the names that may have attempts. Other folders may be large, so they are not listed in depth."""
        names = sorted(name for name, size in store.listed(self._url).items() if size is None)
        return [name for name in names if STEP.fullmatch(name) or may_have(store.listed(self._url / name))]


def _plain(directory: Location, name: str) -> str:
    if name != Path(name).name or name in ("", "..") or "\0" in name:
        raise CheckpointError(f"{name!r} is not the name of a checkpoint in {directory}.")
    return name


def _refuse_foreign(entry: Path) -> None:
    """Raise if ``entry`` has a name that a run replaces or removes, but a run did not write it."""
    if entry.name in (TRACKER, FAILURES, _PROBE):
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
