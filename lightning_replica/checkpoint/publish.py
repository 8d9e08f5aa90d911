"""Publication of a directory of files: it appears as a whole or not at all, and damage to it is detected.

Files are written to ``<path>.tmp-<8 hex digits>`` and flushed to the disk. A manifest with their sizes and checksums is
written last. Then the directory is renamed to ``<path>``. If ``<path>`` exists already, it is first renamed to
``<path>.old``: a crash between the two renames leaves that directory complete, and `published` finds it.

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
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from lightning_replica.checkpoint.attempts import attempts_at
from lightning_replica.checkpoint.files import Files, Readable, damaged, files_of, files_of_attempt
from lightning_replica.checkpoint.location import Location, Url, by_kind
from lightning_replica.checkpoint.manifest import FORMAT, MANIFEST, READABLE, FileInfo, Manifest, parse
from lightning_replica.core.points import reach
from lightning_replica.errors import CheckpointError

log = logging.getLogger(__name__)

_THREADS = 8  # at most; zlib and file reads release the GIL
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


def published(path: Readable) -> Files:
    """Return the files to read for ``path``.

    On a file system these are the files of the former checkpoint if a crash interrupted its replacement. In a store
    they are those of the newest attempt whose files all have their sizes. See [Note: attempts] in `attempts`.

    Raises:
        CheckpointError: If there is no checkpoint.
    """
    if isinstance(path, Files):
        return path
    return by_kind(path, _published_directory, _published_attempt)


def _published_directory(path: Path) -> Files:
    for directory in (path, aside(path)):
        if directory.is_dir():
            return files_of(directory)
    unfinished = [] if not path.parent.is_dir() else [
        entry.name for entry in path.parent.iterdir() if temporary_of(entry.name) == path.name
    ]  # fmt: skip
    raise _nothing_at(path, f"{min(unfinished)} beside it" if unfinished else "")


def check(directory: Readable) -> Manifest:
    """Read the manifest of a published directory, and check that all its files exist and have their sizes.

    Raises:
        CheckpointError: If a file is missing, has another size, or is not in the directory; or if the manifest is
            missing or cannot be read.
    """
    files = files_of(directory)
    manifest = read_manifest(files)
    for name, expected in manifest.files.items():
        size = files.size(name)
        if size != expected.size_bytes:
            raise damaged(files, f"{name} has {size} bytes, but was written with {expected.size_bytes}")
    return manifest


def verify(path: Readable, share: tuple[int, int] = (0, 1)) -> Manifest:
    """Check a directory like `check`, and also compare the checksums of its files.

    A process that checks all files (n = 1) reads several of them at a time.

    Args:
        path: The directory.
        share: (i, n): compare the checksum of the i-th of every n files only, so that n ranks share the work.
            Everything else is checked in any case.

    Raises:
        CheckpointError: As `check` does, and if a file has another checksum.
    """
    files = published(path)
    manifest = check(files)

    def look(name: str) -> None:
        with files.open(name) as stream:
            found = FileInfo.of_stream(stream)
        if found != manifest.files[name]:
            raise damaged(files, f"the checksum of {name} differs from what was written")

    with ThreadPoolExecutor(min(_THREADS, os.cpu_count() or 1) if share[1] == 1 else 1) as threads:
        looks = [threads.submit(look, name) for name in sorted(manifest.files)[share[0] :: share[1]]]
        try:
            for each in looks:
                each.result()
        finally:
            threads.shutdown(cancel_futures=True)
    return manifest


def read_file(directory: Readable, name: str) -> bytes:
    """Return the content of one file of a published directory, with the checks that `verify` makes on it.

    Raises:
        CheckpointError: If the content is not what was written.
    """
    files = files_of(directory)
    expected = read_manifest(files).files.get(name)
    if expected is None:
        raise damaged(files, f"its {MANIFEST} does not list {name}")
    content = files.read(name)
    if FileInfo.of_bytes(content) != expected:
        raise damaged(files, f"the size or checksum of {name} differs from what was written")
    return content


def read_manifest(directory: Readable) -> Manifest:
    """Return the manifest of a directory, without a look at the other files.

    Raises:
        CheckpointError: If the manifest is missing, cannot be read, or has another format.
    """
    files = files_of(directory)
    if not files.has(MANIFEST):
        raise damaged(files, f"it has no {MANIFEST}, so its save was not completed, or something else wrote it")
    try:
        read: dict[str, Any] = parse(files.manifest)
        written_by = read["format"]
        if written_by in READABLE:
            return Manifest.of_plain(read)
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
        raise damaged(files, f"its {MANIFEST} cannot be read ({type(error).__name__}: {error})") from error
    raise CheckpointError(
        f"The {MANIFEST} of the checkpoint {files} has format {written_by!r:.60}, but this version of"
        f" lightning_replica reads format {FORMAT}. Load it with the version that wrote it:"
        f" {read.get('versions')!r:.200}."
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


def _published_attempt(url: Url) -> Files:
    found = attempts_at(url)
    committed = [files_of_attempt(each) for each in found if each.committed]
    if not committed:
        given_up = [each.url.name for each in found if each.given_up]
        raise _nothing_at(url, f"{min(given_up)} in it" if given_up else "")
    whole: list[tuple[tuple[int, ...], Files]] = []
    for each in committed if len(committed) > 1 else ():  # a crash can leave two
        with suppress(CheckpointError):
            whole.append((check(each).age, each))
    return max(whole, key=lambda each: each[0])[1] if whole else committed[0]


def _nothing_at(path: Location, unfinished: str) -> CheckpointError:
    said = f" {unfinished} was never finished; it is not used." if unfinished else ""
    return CheckpointError(f"There is no sharded checkpoint at {path}.{said}")
