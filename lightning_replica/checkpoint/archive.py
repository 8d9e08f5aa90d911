"""Checks that the file that ``torch.save`` wrote, a zip archive, is unchanged.

[Note: checksums of records]
``torch.save`` stores a CRC-32 with every record of the archive: the pickled structure and each storage. ``torch.load``
checks none of them, so it loads a weight with a flipped bit without an error. With these checksums any file that torch
has written, here or under another strategy, can be checked without further data. The bytes outside of records (names,
offsets, sizes, padding) mostly have no effect, or they affect what a record holds, and then its checksum differs. There
is one exception: torch's reader takes a record with a directory's attribute for empty, and leaves the memory of its
tensor unwritten. So attributes must be as torch writes them. Two kinds of file have no checksums: torch's format from
before 1.6, and files written after ``torch.serialization.set_crc32_options(False)``. They are loaded unchecked.
"""

import zipfile
from collections.abc import Iterator
from contextlib import contextmanager
from typing import IO

from lightning_replica.checkpoint.location import Location, Url
from lightning_replica.checkpoint.storage import damaged
from lightning_replica.checkpoint.which_storage import storage_of
from lightning_replica.errors import CheckpointError

_BEGINS = b"PK\x03\x04"
_FLAGS = 0x0808  # the flags that torch sets: sizes also follow a record, names are UTF-8
_READER = "PytorchStreamReader"  # the beginning of the errors of torch's archive reader


def can_be_checked(path: Location) -> bool:
    """Return whether ``path`` is a file or object that can be read twice. torch itself downloads HTTP URLs."""
    return not (isinstance(path, Url) and path.is_web) and storage_of(path).is_file()


def check_archive(path: Location) -> None:
    """Read a whole file of ``torch.save`` and compare it with its checksums. See [Note: checksums of records].

    Args:
        path: The file, or its URL.

    Raises:
        CheckpointError: If the file is damaged. The message names the damaged record, if one can be named.
        OSError: If there is no such file, or it cannot be opened.
    """
    with storage_of(path).open() as stream:
        problem = damage_in(stream)
    if problem:
        raise damaged(path, problem)


def damage_in(stream: IO[bytes]) -> str:
    """Return what is wrong with an open file of ``torch.save``; empty if nothing is, or if it has no checksums.

    Raises:
        CheckpointError: If a store cannot return the data.
    """
    begins = stream.read(len(_BEGINS))
    if len(begins) < len(_BEGINS):
        return "it is empty, or was cut short"
    if begins != _BEGINS and not zipfile.is_zipfile(stream):  # zip marks both ends; a flipped bit may be in one
        return ""
    stream.seek(0)
    try:
        with zipfile.ZipFile(stream) as archive:
            return _damage(archive)
    except CheckpointError:
        raise
    except Exception as error:  # zipfile raises many types for damaged headers
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
    """Turn an error of torch's archive reader into one that names the file.

    Raises:
        CheckpointError: In place of the reader's `RuntimeError`.
    """
    try:
        yield
    except RuntimeError as error:
        if not str(error).startswith(_READER):
            raise
        raise damaged(path, f"its archive is damaged ({error})") from error


def _is_strange(record: zipfile.ZipInfo) -> bool:
    """Return whether torch cannot have written such a record: it compresses none, and writes no directories."""
    others = record.flag_bits & ~_FLAGS or record.external_attr or record.compress_type != zipfile.ZIP_STORED
    return bool(others) or record.compress_size != record.file_size
