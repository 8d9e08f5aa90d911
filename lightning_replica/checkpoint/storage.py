"""What can be done where checkpoints are stored: `disk` is a file system, `object_store` a store of objects."""

import re
from abc import ABC, abstractmethod
from collections.abc import Sequence
from contextlib import AbstractContextManager, ExitStack
from functools import cached_property
from pathlib import Path
from typing import IO, Any, ClassVar, TypeAlias

from lightning_replica.checkpoint.location import Location
from lightning_replica.checkpoint.manifest import MANIFEST, Manifest
from lightning_replica.errors import CheckpointError

TRACKER = "latest"
FAILURES = "failures.json"  # see `failures`
STEP = re.compile(r"step_\d{8,}")
PROBE = f"{TRACKER}.tmp"  # written to see whether a directory can be written to


class Files(ABC):
    """The files of a directory, by name. The manifest and the listing of a store cannot change and are read once."""

    @property
    @abstractmethod
    def directory(self) -> Location:
        """The directory."""

    def __str__(self) -> str:
        return str(self.directory)

    @abstractmethod
    def has(self, name: str) -> bool:
        """Return whether the directory has an entry of that name."""

    @abstractmethod
    def size(self, name: str) -> int:
        """Return the size of a file in bytes.

        Raises:
            CheckpointError: If it is missing, not a regular file, or not directly in the directory.
        """

    @abstractmethod
    def open(self, name: str) -> AbstractContextManager[IO[bytes]]:
        """Open a file for reading at any position.

        Raises:
            CheckpointError: As `size` does.
        """

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


class Destination(AbstractContextManager["Destination"], ABC):
    """One rank's part in a save. Call `begin`, `join`, `deliver` in this order, then `publish` on the first rank.

    If the context ends with an error, what was not published is removed.

    Attributes:
        durable: Whether the rank must flush the files to the disk.
    """

    durable: ClassVar[bool] = True

    def __init__(self) -> None:
        self._stack = ExitStack()

    @property
    @abstractmethod
    def directory(self) -> Path:
        """The directory that this rank writes its files to, after `join`."""

    @abstractmethod
    def begin(self, first: bool) -> str:
        """Create the directory that this rank writes to.

        Args:
            first: Whether this is the first rank, which creates or names the common directory of all ranks.

        Returns:
            The common directory, on the first rank; otherwise an empty string.

        Raises:
            CheckpointError: If that fails.
        """

    @abstractmethod
    def join(self, directory: str) -> None:
        """Use the common directory that the first rank's `begin` returned. This cannot fail."""

    @abstractmethod
    def deliver(self, files: Sequence[Path]) -> None:
        """Bring files of this rank to the directory where they will be published.

        Raises:
            CheckpointError: If that fails.
        """

    @abstractmethod
    def publish(self, manifest: Manifest) -> None:
        """Publish what all ranks have delivered as the checkpoint, in place of the former one.

        Raises:
            CheckpointError: If that fails; also OSError.
        """

    def __exit__(self, *raised: Any) -> None:
        self._stack.__exit__(*raised)


class Storage(ABC):
    """A location, and what can be done there: with one file, with a checkpoint, with a run's directory of checkpoints.

    Every method may raise a CheckpointError if a store does not answer.
    """

    # One file

    @abstractmethod
    def is_file(self) -> bool:
        """Return whether there is a file here, or an object of a store, and not a directory."""

    @abstractmethod
    def exists(self) -> bool:
        """Return whether there is anything here."""

    @abstractmethod
    def open(self) -> AbstractContextManager[IO[bytes]]:
        """Open the file for reading.

        Raises:
            OSError: If there is no such file; CheckpointError where it is an object.
        """

    @abstractmethod
    def replace(self, content: bytes) -> None:
        """Write the file. A crash leaves either the former or the new content.

        Raises:
            CheckpointError: If that fails.
        """

    # A checkpoint

    @abstractmethod
    def may_be_sharded(self) -> bool:
        """Return whether this is a directory, and therefore not an ordinary ``.ckpt``."""

    @abstractmethod
    def holds_others(self) -> bool:
        """Return whether this is a directory but not a checkpoint itself, so that it may hold checkpoints."""

    @abstractmethod
    def files(self) -> Files:
        """Return the files directly in this directory."""

    @abstractmethod
    def candidates(self) -> list[Files]:
        """Return what may be read as the checkpoint of this name. A crash can leave several versions in a store.

        Raises:
            CheckpointError: If there is none.
        """

    @abstractmethod
    def destination(self) -> Destination:
        """Return the destination for one save of the checkpoint of this name."""

    # A run's directory of checkpoints. All names are entries directly in it.

    @abstractmethod
    def check_installed(self) -> None:
        """Check that a package is installed that reaches this storage.

        Raises:
            ConfigurationError: If there is none.
        """

    @abstractmethod
    def names(self) -> list[str]:
        """Return the names of all checkpoints, damaged ones included, in alphabetical order."""

    @abstractmethod
    def child(self, name: str) -> Location:
        """Return the location of the checkpoint ``name``.

        Raises:
            CheckpointError: If ``name`` leads elsewhere.
        """

    @abstractmethod
    def prepare(self) -> list[str]:
        """Make sure that the directory can be written to, and remove what earlier crashed runs left unfinished.

        Returns:
            The names of the checkpoints whose replacement a crash interrupted, for `settle`.

        Raises:
            OSError: If it cannot be written to; also CheckpointError.
        """

    @abstractmethod
    def settle(self, name: str, whole: Location | None) -> None:
        """Finish the interrupted replacement of a checkpoint.

        Args:
            name: A name that `prepare` returned.
            whole: The version that readers find now, if it is whole. If it is not, no version is removed.
        """

    @abstractmethod
    def read(self, name: str) -> bytes | None:
        """Return the content of a file beside the checkpoints; None if there is no such file."""

    @abstractmethod
    def write(self, name: str, content: bytes) -> None:
        """Replace such a file atomically."""

    @abstractmethod
    def remove(self, name: str) -> None:
        """Remove such a file, if there is one.

        Raises:
            OSError: If that fails; also CheckpointError.
        """

    @abstractmethod
    def discard(self, name: str) -> None:
        """Remove a checkpoint."""


def plain_name(directory: Location, name: str) -> str:
    """Return a name if it is one of an entry directly in a directory.

    Raises:
        CheckpointError: If it leads elsewhere.
    """
    if name != Path(name).name or name in ("", "..") or "\0" in name:
        raise CheckpointError(f"{name!r} is not the name of a checkpoint in {directory}.")
    return name


def damaged(directory: Readable, what: str) -> CheckpointError:
    """Return the error for a checkpoint (a directory or a file) that cannot be used."""
    return CheckpointError(f"The checkpoint {directory} cannot be used: {what}. Use another checkpoint.")


def nothing_at(path: Location, unfinished: str) -> CheckpointError:
    """Return the error for a location without a checkpoint.

    Args:
        path: The location.
        unfinished: What a save has left there, which was never finished; empty if there is nothing.
    """
    said = f" {unfinished} was never finished; it is not used." if unfinished else ""
    return CheckpointError(f"There is no sharded checkpoint at {path}.{said}")
