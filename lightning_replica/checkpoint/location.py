"""Where checkpoints lie: a `Path` on a file system, or a `Url` in a store of objects."""

import os
import re
from dataclasses import dataclass
from pathlib import Path
from typing import TypeAlias

from lightning_replica.errors import ConfigurationError

_PROTOCOL = re.compile(r"([a-z][a-z0-9+.-]+)://(.*)", re.DOTALL)
_COLLAPSED = re.compile(r"[a-z][a-z0-9+.-]+:/[^/]")  # what `Path` makes of a URL
_LOCAL = ("file", "local")


@dataclass(frozen=True)
class Url:
    """A place in a store of objects, such as ``s3://bucket/run``, with the members of `Path` that are needed here.

    Attributes:
        text: The URL, without a slash at its end.
    """

    text: str

    def __truediv__(self, name: str) -> "Url":
        return Url(f"{self.text}/{name}")

    def __str__(self) -> str:
        return self.text

    @property
    def name(self) -> str:
        """The text after the last slash."""
        return self.text.rsplit("/", 1)[1]

    @property
    def parent(self) -> "Url":
        """The URL before the last slash."""
        return Url(self.text.rsplit("/", 1)[0])

    @property
    def protocol(self) -> str:
        """The text before the colon, such as ``s3``."""
        return self.text.split(":", 1)[0]

    @property
    def is_web(self) -> bool:
        """Whether this is an HTTP URL, which torch downloads itself, and which cannot be listed."""
        return self.protocol in ("http", "https")


Location: TypeAlias = Path | Url
Given: TypeAlias = str | os.PathLike[str] | Url


def locate(given: Given) -> Location:
    """Return the location that ``given`` names. A ``file://`` or ``local://`` URL becomes a `Path`.

    Raises:
        ConfigurationError: If it is a chained URL, a URL that became a `Path`, or not the URL of a directory.
    """
    if isinstance(given, Url):
        return given
    text = os.fspath(given)
    if "::" in text and "://" in text:
        raise ConfigurationError(f"{text!r} leads through several file systems. Give the URL of the last one.")
    url = _PROTOCOL.fullmatch(text)
    if url is None:
        if not isinstance(given, str) and _COLLAPSED.match(text):
            raise ConfigurationError(
                f"{given!r} was a URL before it became a Path, which has only one slash. Give the URL as a string."
            )
        return Path(os.path.expanduser(text))
    protocol, place = url[1], url[2].rstrip("/")
    if not place.strip("/") or set(place) & set("*?[]"):
        raise ConfigurationError(
            f"{text!r} is not the URL of a directory. Name one, such as 's3://bucket/run', without any of * ? [ ]."
        )
    return Path(place) if protocol in _LOCAL else Url(f"{protocol}://{place}")


def absolute(given: Given) -> Location:
    """Return the location that ``given`` names, independent of the current directory."""
    location = locate(given)
    return location if isinstance(location, Url) else location.absolute()
