"""What readers find under the name of a checkpoint, and whether it is as it was written.

A manifest lists all files of a checkpoint with their sizes and checksums; see `publish`.
"""

import os
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from typing import Any

from lightning_replica.checkpoint.manifest import FORMAT, MANIFEST, READABLE, FileInfo, Manifest, parse
from lightning_replica.checkpoint.storage import Files, Readable, damaged
from lightning_replica.checkpoint.which_storage import files_of, storage_of
from lightning_replica.errors import CheckpointError

_THREADS = 8  # at most; zlib and file reads release the GIL


def published(path: Readable) -> Files:
    """Return the files to read for the checkpoint ``path``: of several versions, the newest whose files are all there.

    Raises:
        CheckpointError: If there is no checkpoint.
    """
    if isinstance(path, Files):
        return path
    found = storage_of(path).candidates()
    whole: list[tuple[tuple[int, ...], Files]] = []
    for each in found if len(found) > 1 else ():
        with suppress(CheckpointError):
            whole.append((check(each).age, each))
    return max(whole, key=lambda each: each[0])[1] if whole else found[0]


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
