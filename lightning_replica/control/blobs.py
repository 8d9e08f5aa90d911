"""Large values that a process leaves for a replacement: results of set-up collectives and of training loops.

A store keeps all values in the memory of the process that serves it, and takes none above a few MiB. So large values go
to files in the supervisor's directory. A replacement on another node cannot read those. So on several nodes they go to
the store as well, in pieces, up to `MOST_BYTES` each.
"""

import io
from collections.abc import Callable
from pathlib import Path
from typing import IO, Final

from lightning_replica.control import keys
from lightning_replica.errors import RecoveryError
from lightning_replica.stores.interface import Store

MOST_BYTES: Final = 256 * 1024**2
_PIECE_BYTES: Final = 1024**2  # etcd takes no more than 1.5 MiB at once


class Blobs:
    """Writes and reads large values by name.

    Args:
        directory: A directory that all processes of this node can read.
        store: The store of the run, if it has several nodes; else None.
    """

    def __init__(self, directory: Path, store: Store | None = None) -> None:
        self._directory, self._store = directory, store

    def put(self, name: str, data: bytes | memoryview, by: int) -> None:
        """Write a value, unless it is there. The arguments are those of `write`, and ``data`` is the value."""
        self.write(name, lambda file: file.write(data), by)

    def write(self, name: str, write_to: Callable[[IO[bytes]], object], by: int) -> None:
        """Have a value written to a file, unless it is there.

        Args:
            name: Its name. Values of the same name are the same.
            write_to: Writes the value to a file.
            by: This rank: another one may write the same value at the same time.

        Raises:
            OSError: If it cannot be written; or what ``write_to`` raises then.
        """
        path = self._directory / name
        if path.exists():
            return
        part = path.with_suffix(f".{by}")
        try:
            with part.open("wb") as file:
                write_to(file)
            part.replace(path)
        except Exception:
            part.unlink(missing_ok=True)  # what there is of it takes room from others
            raise
        is_small = path.stat().st_size <= MOST_BYTES
        if self._store is not None and is_small and not self._store.check([keys.blob(name)]):
            self._post(self._store, name, path.read_bytes())

    def _post(self, store: Store, name: str, data: bytes) -> None:
        starts = range(0, len(data), _PIECE_BYTES)
        for number, start in enumerate(starts):
            store.set(keys.piece(name, number), data[start : start + _PIECE_BYTES])
        store.set(keys.blob(name), str(len(starts)))

    def get(self, name: str) -> bytes:
        """Return a value; see `open`."""
        with self.open(name) as file:
            return file.read()

    def open(self, name: str) -> IO[bytes]:
        """Return a file to read a value from.

        Raises:
            RecoveryError: If it cannot be read here. The message says why.
        """
        try:
            return (self._directory / name).open("rb")
        except OSError as error:
            if self._store is None:
                raise RecoveryError(str(error)) from error
        if not self._store.check([keys.blob(name)]):
            raise RecoveryError(
                f"it is on another node only, as it has more than {MOST_BYTES // 1024**2} MiB, or was not written"
            )
        count = int(self._store.get(keys.blob(name)))
        return io.BytesIO(b"".join(self._store.get(keys.piece(name, number)) for number in range(count)))
