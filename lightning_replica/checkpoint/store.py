"""Objects in a store that fsspec reaches: S3, Google Cloud Storage, Azure and others.

An object appears under its name whole or not at all, and does not change. There is no rename, and there are no
directories; names contain slashes. This module caches nothing, so it sees at once what other processes have written.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any

from lightning_replica.checkpoint.location import Url
from lightning_replica.errors import CheckpointError, ConfigurationError

_BLOCK_BYTES = 8 << 20  # read at a time
_BLOCKS = 8  # kept in memory, because a reader of a tensor looks at its end first


def look_for_package(url: Url) -> None:
    """Check that a package is installed that can access ``url``. This does not connect to the store.

    Raises:
        ConfigurationError: If no such package is installed.
    """
    from fsspec import get_filesystem_class  # imported here, so that only code that needs it pays for the import

    try:
        get_filesystem_class(url.protocol)
    except ImportError as error:
        raise ConfigurationError(f"{url} needs a package that is not installed: {error}.") from error
    except ValueError as error:
        raise ConfigurationError(
            f"{url} cannot be reached: {error}. Choose a protocol that fsspec knows (fsspec.available_protocols())."
        ) from error


def listed(url: Url) -> dict[str, int | None]:
    """Return the names directly under ``url``: objects with their sizes in bytes, and folders with None.

    Raises:
        CheckpointError: If the store cannot be listed.
    """
    place, entries = _entries(url, "ls", [])
    found: dict[str, int | None] = {}
    for entry in entries:
        parent, _, name = entry["name"].rstrip("/").rpartition("/")
        if parent == place.rstrip("/") and name:
            found[name] = None if entry["type"] == "directory" else entry["size"]
    return found


def objects(url: Url) -> dict[str, int]:
    """Return the sizes in bytes of all objects under ``url``, at any depth, by the rest of their names.

    Raises:
        CheckpointError: If the store cannot be listed.
    """
    place, entries = _entries(url, "find", {})
    begins = place.rstrip("/") + "/"
    return {name.removeprefix(begins): each["size"] for name, each in entries.items() if name.startswith(begins)}


def is_object(url: Url) -> bool:
    """Return whether there is an object of that name.

    Raises:
        CheckpointError: If the store does not say; fsspec's ``isfile`` is False then, too.
    """
    with _naming(url, "looked for"):
        system, place = _connect(url)
        system.invalidate_cache()
        try:
            return bool(system.info(place)["type"] == "file")
        except (FileNotFoundError, NotADirectoryError):
            return False


def read(url: Url) -> bytes | None:
    """Return the content of an object; None if there is no such object.

    Raises:
        CheckpointError: If it cannot be read.
    """
    with _naming(url, "read"):
        system, place = _connect(url)
        try:
            content: bytes = system.cat_file(place)
        except FileNotFoundError:
            return None
        return content


@contextmanager
def opened(url: Url) -> Iterator[IO[bytes]]:
    """Open an object to read parts of it."""
    with _naming(url, "read"):
        system, place = _connect(url)
        options = {"cache_type": "blockcache", "cache_options": {"maxblocks": _BLOCKS}}
        with system.open(place, "rb", block_size=_BLOCK_BYTES, **options) as stream:
            yield stream


def write(url: Url, content: bytes) -> None:
    """Write an object; an existing one is replaced.

    Raises:
        CheckpointError: If that fails.
    """
    with _naming(url, "written"):
        system, place = _connect(url)
        system.pipe_file(place, content)


def upload(file: Path, url: Url) -> None:
    """Upload a file as an object.

    Raises:
        CheckpointError: If that fails.
    """
    with _naming(url, "written"):
        system, place = _connect(url)
        system.put_file(str(file), place)


def remove(urls: Sequence[Url]) -> None:
    """Remove objects, in any order.

    Raises:
        CheckpointError: If that fails.
    """
    if urls:
        with _naming(urls[0], "removed"):
            system, _ = _connect(urls[0])
            system.rm([_connect(url)[1] for url in urls])


def _entries(url: Url, method: str, nothing: Any) -> tuple[str, Any]:
    """Return fsspec's path of ``url``, and what ``method`` lists there now: ``nothing`` if there is no such place."""
    with _naming(url, "listed"):
        system, place = _connect(url)
        system.invalidate_cache()
        try:
            return place, getattr(system, method)(place, detail=True)
        except (FileNotFoundError, NotADirectoryError):
            return place, nothing


def _connect(url: Url) -> tuple[Any, str]:
    """Return fsspec's file system for ``url``, which fsspec caches, and its path there."""
    from fsspec.core import url_to_fs

    look_for_package(url)
    found: tuple[Any, str] = url_to_fs(str(url))
    return found


@contextmanager
def _naming(url: Url, done: str) -> Iterator[None]:
    """Turn the errors of a store, of any type, into a `CheckpointError` that names the URL."""
    try:
        yield
    except (CheckpointError, ConfigurationError):
        raise
    except Exception as error:
        text = str(error).rstrip(".") or "no reason given"
        raise CheckpointError(f"{url} could not be {done}: {type(error).__name__}: {text}.") from error
