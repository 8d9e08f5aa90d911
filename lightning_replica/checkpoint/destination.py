"""Where one save writes before publication: on a file system (`publish`), or in a store of objects (`attempts`)."""

import logging
import os
import tempfile
from collections.abc import Sequence
from contextlib import AbstractContextManager, ExitStack, suppress
from pathlib import Path
from typing import Any

from lightning_replica.checkpoint import attempts, lease, publish, store
from lightning_replica.checkpoint.attempts import Attempt
from lightning_replica.checkpoint.location import Location, Url, by_kind
from lightning_replica.checkpoint.manifest import MANIFEST, Manifest
from lightning_replica.control.journal import SPOOL
from lightning_replica.errors import CheckpointError, ConfigurationError

log = logging.getLogger(__name__)


class Destination(AbstractContextManager["Destination"]):
    """One rank's part in a save. Call `begin`, `join`, `deliver` in this order, then `publish` on the first rank.

    If the context ends with an error, what was not published is removed.

    Attributes:
        directory: The directory that this rank writes its files to, after `join`.
        durable: Whether the rank must flush the files to the disk.
    """

    directory: Path
    durable = True

    def __init__(self) -> None:
        self._stack = ExitStack()

    def begin(self, first: bool) -> str:
        """Create the place that this rank writes to.

        Args:
            first: Whether this is the first rank, which creates or names the common place of all ranks.

        Returns:
            The common place, on the first rank; otherwise an empty string.

        Raises:
            CheckpointError: If that fails.
        """
        raise NotImplementedError

    def join(self, place: str) -> None:
        """Use the common place that the first rank's `begin` returned. This cannot fail."""
        raise NotImplementedError

    def deliver(self, files: Sequence[Path]) -> None:
        """Bring files of this rank to the place where they will be published.

        Raises:
            CheckpointError: If that fails.
        """

    def publish(self, manifest: Manifest) -> None:
        """Publish what all ranks have delivered as the checkpoint, in place of the former one.

        Raises:
            CheckpointError: If that fails; also OSError.
        """
        raise NotImplementedError

    def __exit__(self, *raised: Any) -> None:
        self._stack.__exit__(*raised)


def destination(path: Location) -> Destination:
    """Return the destination for one save of the checkpoint ``path``."""
    return by_kind(path, _OnDisk, _InStore)


class _OnDisk(Destination):
    """All ranks write into one directory, which is renamed on publication."""

    def __init__(self, path: Path) -> None:
        super().__init__()
        self._path = path

    def begin(self, first: bool) -> str:
        if not first:
            return ""
        try:
            lease.keep(self._path.parent)
        except (OSError, ConfigurationError) as error:
            raise CheckpointError(str(error)) from error
        return str(self._stack.enter_context(publish.staged(self._path)))

    def join(self, place: str) -> None:
        self.directory = Path(place)

    def publish(self, manifest: Manifest) -> None:
        publish.publish(self.directory, self._path, manifest)


class _InStore(Destination):
    """Each rank writes into a local directory of its own and uploads the files from there.

    That directory lies in the supervisor's, if there is one, so what a killed rank leaves is removed when the run ends.
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
                f"No temporary directory could be made for the upload: {error}. Set TMPDIR."
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
                for attempt in attempts.attempts_at(self._url):
                    if attempt.url == self._attempt:
                        attempt.remove()
