"""The one file that ``torch.save`` writes, a zip archive, and whether it is as it was written.

[Note: checksums of records]
``torch.save`` stores a CRC-32 with every record of the archive, the pickled structure and each storage, and
``torch.load`` looks at none of them: a flipped bit in a weight is loaded as if nothing had happened. So whatever torch
has written, here or under another strategy, can be checked without anything beside it. What lies outside of records
(names, offsets, sizes, padding) mostly decides either what a record holds, and then its checksum shows it, or nothing.
But torch's reader takes a record with a directory's attribute for empty, and leaves the memory of its tensor as it
finds it; so attributes must be as torch writes them. Two kinds of file have no checksums: torch's format from before
1.6, and what is written after ``torch.serialization.set_crc32_options(False)``. They are loaded as ever.
"""

import zipfile
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import IO

from lightning_replica.checkpoint import store
from lightning_replica.checkpoint.files import damaged
from lightning_replica.checkpoint.location import Location, Url
from lightning_replica.errors import CheckpointError

_BEGINS = b"PK\x03\x04"
_FLAGS = 0x0808  # that torch sets: sizes also follow a record, names are UTF-8
_READER = "PytorchStreamReader"  # begins what torch's reader of archives complains of


def can_be_checked(path: Location) -> bool:
    """Return whether there is a file that can be read twice; what comes by HTTP is downloaded by torch itself."""
    if isinstance(path, Url):
        return path.protocol not in ("http", "https") and store.is_object(path)
    return path.is_file()


def check_archive(path: Location) -> None:
    """Read all of a file of ``torch.save``, and compare it with its checksums. See [Note: checksums of records].

    Args:
        path: The file, or its URL.

    Raises:
        CheckpointError: If the file is damaged; it names the record.
        OSError: If there is none, or it cannot be opened.
    """
    with _opened(path) as stream:
        problem = damage_in(stream)
    if problem:
        raise damaged(path, problem)


def damage_in(stream: IO[bytes]) -> str:
    """Return what is wrong with an open file of ``torch.save``; nothing for one that has no checksums.

    Raises:
        CheckpointError: If a store does not give what it has.
    """
    begins = stream.read(len(_BEGINS))
    if len(begins) < len(_BEGINS):
        return "it is empty, or was cut short"
    if begins != _BEGINS and not zipfile.is_zipfile(stream):  # either end tells: a flipped bit may have hit the other
        return ""
    stream.seek(0)
    try:
        with zipfile.ZipFile(stream) as archive:
            return _damage(archive)
    except CheckpointError:
        raise
    except Exception as error:  # whatever zipfile makes of damaged headers
        return f"its archive is damaged ({type(error).__name__}: {error})"


def _damage(archive: zipfile.ZipFile) -> str:
    records = archive.infolist()
    if not any(record.CRC for record in records):
        return ""
    strange = [record.filename for record in records if _is_strange(record)]
    if strange:
        return f"the header of its record {strange[0]} is damaged"
    wrong = archive.testzip()
    return f"the checksum of its record {wrong} differs" if wrong else ""


@contextmanager
def reading(path: Location) -> Iterator[None]:
    """Have what torch's reader says of a damaged archive name the file.

    Raises:
        CheckpointError: In place of its `RuntimeError`.
    """
    try:
        yield
    except RuntimeError as error:
        if not str(error).startswith(_READER):
            raise
        raise damaged(path, f"its archive is damaged ({error})") from error


def _is_strange(record: zipfile.ZipInfo) -> bool:
    """Whether torch has not written a record like this: it compresses none, and there are no directories."""
    others = record.flag_bits & ~_FLAGS or record.external_attr or record.compress_type != zipfile.ZIP_STORED
    return bool(others) or record.compress_size != record.file_size


def _opened(path: Location) -> AbstractContextManager[IO[bytes]]:
    return store.opened(path) if isinstance(path, Url) else path.open("rb")
