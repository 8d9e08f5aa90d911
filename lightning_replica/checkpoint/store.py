"""Objects in a store that fsspec reaches: S3, Google Cloud Storage, Azure and others.

An object appears under its name whole or not at all, and stays as it is. There is no rename, and there are no
directories: names have slashes. What other processes have written is seen at once; nothing is remembered here.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any

from lightning_replica.checkpoint.location import Url
from lightning_replica.errors import CheckpointError, ConfigurationError

_BLOCK_BYTES = 8 << 20  # of what is read at a time
_BLOCKS = 8  # that are kept: whoever reads a tensor looks at the end of it first


def look_for_package(url: Url) -> None:
    """Makes sure that something is installed that reaches ``url``; connects to nothing.

    Raises:
        ConfigurationError: If not.
    """
    from fsspec import get_filesystem_class  # the few who need it shall pay for it

    try:
        get_filesystem_class(url.protocol)
    except ImportError as error:
        raise ConfigurationError(f"{url} needs a package that is not installed: {error}.") from error
    except ValueError as error:
        raise ConfigurationError(
            f"{url} cannot be reached: {error}. Choose a protocol that fsspec knows (fsspec.available_protocols())."
        ) from error


def listed(url: Url) -> dict[str, int | None]:
    """What lies directly under ``url``: objects with their sizes in bytes; None for names that more lies under.

    Raises:
        CheckpointError: If the store does not say.
    """
    place, entries = _entries(url, "ls", [])
    found: dict[str, int | None] = {}
    for entry in entries:
        parent, _, name = entry["name"].rstrip("/").rpartition("/")
        if parent == place.rstrip("/") and name:
            found[name] = None if entry["type"] == "directory" else entry["size"]
    return found


def objects(url: Url) -> dict[str, int]:
    """All objects under ``url``, however deep: bytes by what is left of the name.

    Raises:
        CheckpointError: If the store does not say.
    """
    place, entries = _entries(url, "find", {})
    begins = place.rstrip("/") + "/"
    return {name.removeprefix(begins): each["size"] for name, each in entries.items() if name.startswith(begins)}


def is_object(url: Url) -> bool:
    """Whether there is an object of that name, which we may read."""
    with _naming(url, "looked for"):
        system, place = _connect(url)
        system.invalidate_cache()
        return bool(system.isfile(place))


def read(url: Url) -> bytes | None:
    """What is in an object; None if there is none.

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
    """An object, to read pieces of it."""
    with _naming(url, "read"):
        system, place = _connect(url)
        options = {"cache_type": "blockcache", "cache_options": {"maxblocks": _BLOCKS}}
        with system.open(place, "rb", block_size=_BLOCK_BYTES, **options) as stream:
            yield stream


def write(url: Url, content: bytes) -> None:
    """Makes an object, or replaces it.

    Raises:
        CheckpointError: If that fails.
    """
    with _naming(url, "written"):
        system, place = _connect(url)
        system.pipe_file(place, content)


def upload(file: Path, url: Url) -> None:
    """Makes an object of a file.

    Raises:
        CheckpointError: If that fails.
    """
    with _naming(url, "written"):
        system, place = _connect(url)
        system.put_file(str(file), place)


def remove(urls: Sequence[Url]) -> None:
    """Removes objects, in any order.

    Raises:
        CheckpointError: If that fails.
    """
    if urls:
        with _naming(urls[0], "removed"):
            system, _ = _connect(urls[0])
            system.rm([_connect(url)[1] for url in urls])


def _entries(url: Url, method: str, nothing: Any) -> tuple[str, Any]:
    """What fsspec calls ``url``, and what its ``method`` lists there now; ``nothing`` if there is no such place."""
    with _naming(url, "listed"):
        system, place = _connect(url)
        system.invalidate_cache()
        try:
            return place, getattr(system, method)(place, detail=True)
        except (FileNotFoundError, NotADirectoryError):
            return place, nothing


def _connect(url: Url) -> tuple[Any, str]:
    """The file system of fsspec's for ``url``, and what it calls that place; fsspec remembers it."""
    from fsspec.core import url_to_fs

    look_for_package(url)
    found: tuple[Any, str] = url_to_fs(str(url))
    return found


@contextmanager
def _naming(url: Url, done: str) -> Iterator[None]:
    """Every store has errors of its own."""
    try:
        yield
    except (CheckpointError, ConfigurationError):
        raise
    except Exception as error:
        text = str(error).rstrip(".") or "no reason given"
        raise CheckpointError(f"{url} could not be {done}: {type(error).__name__}: {text}.") from error
