"""Where one save writes, until it is published: on a file system (`publish`), or in a store of objects (`attempts`)."""

import logging
import os
import tempfile
from collections.abc import Sequence
from contextlib import AbstractContextManager, ExitStack, suppress
from pathlib import Path
from typing import Any

from lightning_replica.checkpoint import attempts, publish, store
from lightning_replica.checkpoint.attempts import Attempt
from lightning_replica.checkpoint.location import Location, Url
from lightning_replica.checkpoint.manifest import MANIFEST, Manifest
from lightning_replica.errors import CheckpointError
from lightning_replica.recovery.journal import SPOOL

log = logging.getLogger(__name__)


class Destination(AbstractContextManager["Destination"]):
    """One rank's part in a save: `begin`, `join`, `deliver`; then `publish`, on the first rank. In that order.

    Leaving the context with an error removes what is not published.

    Attributes:
        directory: Where this rank writes its files, from `join` on.
        durable: Whether it must bring them to the disk.
    """

    directory: Path
    durable = True

    def __init__(self) -> None:
        self._stack = ExitStack()

    def begin(self, first: bool) -> str:
        """Makes room for what this rank writes.

        Args:
            first: Whether this is the first rank, which makes the place for all.

        Returns:
            That place, on the first rank.

        Raises:
            CheckpointError: If that fails.
        """
        raise NotImplementedError

    def join(self, place: str) -> None:
        """Takes the place that the first rank has made; cannot fail."""
        raise NotImplementedError

    def deliver(self, files: Sequence[Path]) -> None:
        """Brings files of this rank's to where they will be published.

        Raises:
            CheckpointError: If that fails.
        """

    def publish(self, manifest: Manifest) -> None:
        """Makes what all ranks have delivered the checkpoint, in place of what was there.

        Raises:
            CheckpointError: If that fails; the former one stays.
        """
        raise NotImplementedError

    def __exit__(self, *raised: Any) -> None:
        self._stack.__exit__(*raised)


def destination(path: Location) -> Destination:
    """For a save of the checkpoint ``path``."""
    return _InStore(path) if isinstance(path, Url) else _OnDisk(path)


class _OnDisk(Destination):
    """All write into one directory, which is renamed."""

    def __init__(self, path: Path) -> None:
        super().__init__()
        self._path = path

    def begin(self, first: bool) -> str:
        return str(self._stack.enter_context(publish.staged(self._path))) if first else ""

    def join(self, place: str) -> None:
        self.directory = Path(place)

    def publish(self, manifest: Manifest) -> None:
        publish.publish(self.directory, self._path, manifest)


class _InStore(Destination):
    """Each writes into a directory of its own, from which its files are uploaded.

    It lies in the supervisor's, if there is one: a rank that is killed leaves nothing behind for longer than the run.
    """

    durable = False

    def __init__(self, url: Url) -> None:
        super().__init__()
        self._url, self._published = url, False

    def begin(self, first: bool) -> str:
        try:
            made = tempfile.TemporaryDirectory(
                prefix="lightning_replica-", dir=os.environ.get(SPOOL), ignore_cleanup_errors=True
            )
        except OSError as error:
            raise CheckpointError(
                f"There is no directory to write into before the upload: {error}. Set TMPDIR."
            ) from error
        self.directory = Path(self._stack.enter_context(made))
        if not first:
            return ""
        self._attempt = attempts.new(self._url)
        self._stack.push(self._give_up)
        return str(self._attempt)

    def join(self, place: str) -> None:
        self._attempt = Url(place)

    def deliver(self, files: Sequence[Path]) -> None:
        for file in files:
            store.upload(file, self._attempt / file.name)

    def publish(self, manifest: Manifest) -> None:
        former = {each.url: each for each in attempts.attempts_at(self._url)}
        found = former.pop(self._attempt, Attempt(self._attempt, {}))
        for name, expected in manifest.files.items():
            if found.sizes.get(name) != expected.size_bytes:
                raise CheckpointError(
                    f"{self._attempt / name} was written with {expected.size_bytes} bytes, and the store lists"
                    f" {found.sizes.get(name, 'nothing')}."
                )
        store.write(self._attempt / MANIFEST, manifest.as_bytes())
        self._published = True
        try:
            for attempt in former.values():
                if attempt.committed:
                    attempt.remove()
        except CheckpointError as error:  # of two, readers take the newer; the next start tidies up
            log.warning("%s is written, but what it replaces could not be removed: %s", self._url, error)

    def _give_up(self, kind: type[BaseException] | None, *_: Any) -> None:
        if kind is not None and issubclass(kind, Exception) and not self._published:
            with suppress(CheckpointError):  # the next start tidies up
                for attempt in attempts.attempts_at(self._url):
                    if attempt.url == self._attempt:
                        attempt.remove()
