"""Publication of a directory of files on a file system: it appears as a whole or not at all.

Files are written to ``<path>.tmp-<8 hex digits>`` and flushed to the disk. A manifest with their sizes and checksums is
written last. Then the directory is renamed to ``<path>``. If ``<path>`` exists already, it is first renamed to
``<path>.old``: a crash between the two renames leaves that directory complete, and readers find it.

[Note: two saves of one path]
Every save has a temporary directory of its own. A save may still be under way on some ranks that have not noticed that
other ranks gave it up; it cannot write into the directory of another save. Once a save is published, the temporary
directories of all other saves of this path are removed, so those saves fail.
"""

import errno
import logging
import os
import re
import secrets
import shutil
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from lightning_replica.checkpoint.manifest import MANIFEST, Manifest
from lightning_replica.core.points import reach
from lightning_replica.errors import CheckpointError

log = logging.getLogger(__name__)

_CANNOT_FLUSH = (errno.EINVAL, errno.ENOTSUP)  # directories of some network file systems and of FUSE
_TEMPORARY = re.compile(r"(?P<path>.+)\.(tmp|gone)-[0-9a-f]{8}")


@contextmanager
def staged(path: Path) -> Iterator[Path]:
    """Create an empty directory to write into, and remove it if the block raises. See [Note: two saves of one path].

    Raises:
        CheckpointError: If ``path`` is a directory that holds anything but a checkpoint, or if the directory cannot be
            created.
    """
    for name in (path, aside(path)):
        refuse_foreign(name)
    directory = _temporary(path, "tmp")
    with naming(directory):
        make_directory(path.parent)
        directory.mkdir()
    try:
        yield directory
    except Exception:
        with suppress(OSError):  # the next start removes what stays
            discard(directory)
        raise


def publish(directory: Path, path: Path, manifest: Manifest) -> None:
    """Write the manifest to ``directory`` and rename ``directory`` to ``path``, in place of what was there.

    Every file in ``manifest`` must have been flushed to the disk already (`write_file` does so). What fails after the
    directory has its name is only logged.
    """
    write_file(directory / MANIFEST, manifest.as_bytes())
    sync(directory)
    former = aside(path)
    if os.path.lexists(path):
        discard(former)
        path.rename(former)
        reach("publish")
    directory.rename(path)
    try:
        sync(path.parent)
        discard(former)
        for given_up in path.parent.iterdir():
            if temporary_of(given_up.name) == path.name and ".tmp-" in given_up.name:
                discard(given_up)
    except OSError as error:  # readers see it: whoever took this save for failed would end a run that has saved
        log.warning(
            "%s is written, but its name could not be flushed, or the former checkpoint not be removed: %s",
            path,
            error,
        )


def write_file(file: Path, content: bytes) -> None:
    """Write a file and flush it to the disk.

    Raises:
        CheckpointError: If that fails. The message names the file.
    """
    with naming(file), file.open("wb") as stream:
        stream.write(content)
        stream.flush()
        os.fsync(stream.fileno())


def replace_file(file: Path, content: bytes) -> None:
    """Write a file atomically: a crash leaves either the former or the new content.

    Raises:
        CheckpointError: If that fails. The message names the file.
    """
    unfinished = file.with_name(file.name + ".tmp")
    write_file(unfinished, content)
    with naming(file):
        unfinished.replace(file)
        sync(file.parent)


def make_directory(directory: Path) -> None:
    """Create a directory and its missing parents, and flush their names to the disk."""
    if not directory.is_dir():
        make_directory(directory.parent)
        directory.mkdir(exist_ok=True)
        sync(directory.parent)


def sync(path: Path) -> None:
    """Flush the content of a file, or the names in a directory, to the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    except OSError as error:
        if error.errno not in _CANNOT_FLUSH or not path.is_dir():
            raise
    finally:
        os.close(descriptor)


def restore(former: Path, path: Path) -> None:
    """Rename ``former``, which was set aside, back to ``path``."""
    former.rename(path)
    sync(path.parent)


def discard(path: Path) -> None:
    """Remove what is at ``path``, if anything. A crash during removal leaves a directory that nothing loads.

    On file systems that cannot delete open files, such files stay in that directory.
    """
    if path.is_dir() and not path.is_symlink():
        gone = _temporary(path, "gone")
        path.rename(gone)
        shutil.rmtree(gone, ignore_errors=True)
    else:
        path.unlink(missing_ok=True)


def refuse_foreign(path: Path) -> None:
    """Refuse to replace a directory that this package did not write. A ``path`` that is a file or link is accepted.

    Raises:
        CheckpointError: If the directory holds anything but regular files, or files without a manifest.
    """
    if path.is_symlink() or not path.is_dir():
        return
    entries = list(path.iterdir())
    strange = [entry.name for entry in entries if entry.is_symlink() or not entry.is_file()]
    if strange or (entries and path / MANIFEST not in entries):
        what = f"holds {min(strange)!r}" if strange else f"holds files, but no {MANIFEST}"
        raise CheckpointError(
            f"{path} is not replaced by a checkpoint: it {what}, so something else wrote it. Move it away."
        )


def temporary_of(name: str) -> str | None:
    """Return the name of the checkpoint that a temporary ``name`` belongs to; None if ``name`` is not temporary."""
    match = _TEMPORARY.fullmatch(name)
    return None if match is None else match["path"]


def aside(path: Path) -> Path:
    """Return where the former checkpoint ``path`` lies while it is replaced."""
    return path.with_name(path.name + ".old")


@contextmanager
def naming(file: Path) -> Iterator[None]:
    """Turn an `OSError` of the block into an error that names the file.

    Raises:
        CheckpointError: In place of the `OSError`.
    """
    try:
        yield
    except OSError as error:
        raise CheckpointError(f"{file} could not be written: {error.strerror or error}.") from error


def _temporary(path: Path, ending: str) -> Path:
    return path.with_name(f"{temporary_of(path.name) or path.name}.{ending}-{secrets.token_hex(4)}")
