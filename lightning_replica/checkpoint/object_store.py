"""Checkpoints in a store of objects: every save is an attempt of its own. See [Note: attempts] in `attempts`."""

# ruff: noqa: D102 (`storage` says what the methods do)

import logging
import os
import tempfile
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, suppress
from pathlib import Path
from typing import IO, Any, ClassVar

from lightning_replica.checkpoint import attempts, store
from lightning_replica.checkpoint.attempts import Attempt, attempts_at, may_have
from lightning_replica.checkpoint.location import Location, Url
from lightning_replica.checkpoint.manifest import MANIFEST, Manifest
from lightning_replica.checkpoint.storage import (
    PROBE,
    STEP,
    Destination,
    Files,
    Storage,
    damaged,
    nothing_at,
    plain_name,
)
from lightning_replica.control.journal import SPOOL
from lightning_replica.errors import CheckpointError

log = logging.getLogger(__name__)


class ObjectStore(Storage):
    """A URL in a store of objects."""

    def __init__(self, url: Url) -> None:
        self._url = url

    def is_file(self) -> bool:
        return store.is_object(self._url)

    def exists(self) -> bool:
        return store.is_object(self._url) or bool(store.listed(self._url))

    def open(self) -> AbstractContextManager[IO[bytes]]:
        return store.opened(self._url)

    def replace(self, content: bytes) -> None:
        store.write(self._url, content)

    def may_be_sharded(self) -> bool:
        # Whether it is an object is asked first: permission to read need not include listing.
        return not self._url.is_web and not store.is_object(self._url) and bool(store.listed(self._url))

    def holds_others(self) -> bool:
        names = store.listed(self._url)
        return bool(names) and not may_have(names)

    def files(self) -> Files:
        return _FilesInStore(self._url, store.objects(self._url))

    def candidates(self) -> list[Files]:
        found = attempts_at(self._url)
        committed = [_FilesInStore(each.url, each.sizes) for each in found if each.committed]
        if not committed:
            given_up = [each.url.name for each in found if each.given_up]
            raise nothing_at(self._url, f"{min(given_up)} in it" if given_up else "")
        return [*committed]

    def destination(self) -> Destination:
        return _Upload(self._url)

    def check_installed(self) -> None:
        store.look_for_package(self._url)

    def names(self) -> list[str]:
        return [name for name in self._names() if any(each.committed for each in attempts_at(self._url / name))]

    def child(self, name: str) -> Url:
        return self._url / plain_name(self._url, name)

    def prepare(self) -> list[str]:
        store.write(self._url / PROBE, b"can it be written?\n")
        store.remove([self._url / PROBE])
        halves = []
        for name in self._names():
            found = attempts_at(self._url / name)
            for attempt in found:
                if attempt.given_up:
                    attempt.remove()
            if len([attempt for attempt in found if attempt.committed]) > 1:
                halves.append(name)
        return halves

    def settle(self, name: str, whole: Location | None) -> None:
        for attempt in attempts_at(self._url / name) if whole is not None else ():
            if attempt.committed and attempt.url != whole:
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


class _FilesInStore(Files):
    def __init__(self, directory: Url, sizes: Mapping[str, int]) -> None:
        self._directory, self._sizes = directory, sizes

    @property
    def directory(self) -> Url:
        return self._directory

    def has(self, name: str) -> bool:
        return name in self._sizes

    def size(self, name: str) -> int:
        return self._sizes[self._listed(name)]

    def open(self, name: str) -> AbstractContextManager[IO[bytes]]:
        return store.opened(self._directory / self._listed(name))

    def read(self, name: str) -> bytes:
        content = store.read(self._directory / self._listed(name))
        if content is None:
            raise damaged(self, f"{name} is gone")
        return content

    def _listed(self, name: str) -> str:
        """Return ``name`` if the store listed it: such a name cannot lead outside of the directory."""
        if name not in self._sizes or "/" in name:
            raise damaged(self, f"{name} is missing")
        return name


class _Upload(Destination):
    """Each rank writes into a local directory of its own and uploads the files from there.

    That directory lies in the supervisor's, if there is one, so what a killed rank leaves is removed when the run ends.
    """

    durable: ClassVar[bool] = False

    def __init__(self, url: Url) -> None:
        super().__init__()
        self._url, self._published = url, False
        self._directory = Path()  # until `begin`
        self._attempt = url  # until `join`

    @property
    def directory(self) -> Path:
        return self._directory

    def begin(self, first: bool) -> str:
        try:
            made = tempfile.TemporaryDirectory(
                prefix="lightning_replica-", dir=os.environ.get(SPOOL), ignore_cleanup_errors=True
            )
        except OSError as error:
            raise CheckpointError(
                f"No temporary directory could be made for the upload: {error}. Set TMPDIR."
            ) from error
        self._directory = Path(self._stack.enter_context(made))
        if not first:
            return ""
        self._attempt = attempts.new(self._url)
        self._stack.push(self._give_up)
        return str(self._attempt)

    def join(self, directory: str) -> None:
        self._attempt = Url(directory)

    def deliver(self, files: Sequence[Path]) -> None:
        for file in files:
            store.upload(file, self._attempt / file.name)

    def publish(self, manifest: Manifest) -> None:
        former = {each.url: each for each in attempts_at(self._url)}
        found = former.pop(self._attempt, Attempt(self._attempt, {}))
        for name, expected in manifest.files.items():
            if found.sizes.get(name) != expected.size_bytes:
                raise CheckpointError(
                    f"{self._attempt / name} was written with {expected.size_bytes} bytes, but the store lists"
                    f" {found.sizes.get(name, 'nothing')}."
                )
        store.write(self._attempt / MANIFEST, manifest.as_bytes())
        self._published = True
        try:
            for attempt in former.values():
                if attempt.committed:
                    attempt.remove()
        except CheckpointError as error:  # readers take the newer of two attempts; the next start removes the other
            log.warning("%s is written, but the former checkpoint could not be removed: %s", self._url, error)

    def _give_up(self, kind: type[BaseException] | None, *_: Any) -> None:
        if kind is not None and issubclass(kind, Exception) and not self._published:
            with suppress(CheckpointError):  # the next start removes what stays
                for attempt in attempts_at(self._url):
                    if attempt.url == self._attempt:
                        attempt.remove()
