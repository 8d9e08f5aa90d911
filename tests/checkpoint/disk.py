"""Every call with which this process changes the disk, one by one: each may be its last, or fail."""

import errno
import io
import os
import pathlib
import signal
import sys
from collections.abc import Callable
from typing import Any

_CHANGES = {"os.rename", "os.mkdir", "os.rmdir", "os.remove", "os.link", "os.symlink"}
_WRITING = os.O_WRONLY | os.O_RDWR | os.O_CREAT


def watch_disk(before: Callable[[str, Any], None]) -> None:
    """Calls ``before(what, args)`` before every such call, for as long as this process lives.

    What is written goes to the disk in two halves, with a call of "write" before each: a process may be killed in the
    middle of a write. Files are seen if they are opened as a `Path`, as all are here.
    """
    really_open, really_sync = pathlib.Path.open, os.fsync

    class Halves(io.FileIO):
        def write(self, content: Any) -> int:
            content, done = memoryview(content).cast("B"), 0
            for part in (content[: len(content) // 2], content[len(content) // 2 :]):
                before("write", self)
                while len(part):
                    written = super().write(part)
                    done, part = done + written, part[written:]
            return done

    def open_halves(path: pathlib.Path, mode: str = "r", *args: Any, **kwargs: Any) -> Any:
        return io.BufferedWriter(Halves(path, "w")) if mode == "wb" else really_open(path, mode, *args, **kwargs)

    def sync(fd: Any) -> None:
        before("fsync", fd)
        really_sync(fd)

    def audit(event: str, args: tuple[Any, ...]) -> None:
        if event in _CHANGES or (event == "open" and isinstance(args[2], int) and args[2] & _WRITING):
            before(event, args)

    pathlib.Path.open = open_halves  # type: ignore[method-assign, assignment]
    os.fsync = sync
    sys.addaudithook(audit)


def die_before(number: int) -> None:
    """Kills this process before the ``number``-th call, counted from 1."""
    calls = 0

    def count(what: str, args: Any) -> None:
        nonlocal calls
        calls += 1
        if calls == number:
            os.kill(os.getpid(), signal.SIGKILL)

    watch_disk(count)


def fill_up_before(number: int) -> None:
    """From the ``number``-th call on there is no space left: files and directories can only be renamed and removed."""
    calls = 0

    def count(what: str, args: Any) -> None:
        nonlocal calls
        calls += 1
        if calls >= number and what not in ("os.rename", "os.rmdir", "os.remove"):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    watch_disk(count)


class Unsynced:
    """What has been written, and not been brought to the disk; and every renaming that came too early."""

    def __init__(self) -> None:
        self.dirty: dict[int, str] = {}  # by inode
        self.names: set[int] = set()  # directories in which a directory has got its name, by inode
        self.early: list[str] = []
        self.renamed = 0
        watch_disk(self._see)

    def _see(self, what: str, args: Any) -> None:
        if what == "fsync":
            self.dirty.pop(inode := os.fstat(args).st_ino, None)
            self.names.discard(inode)
        elif what == "write":
            self.dirty[os.fstat(args.fileno()).st_ino] = args.name
        elif what in ("os.rename", "os.mkdir", "open"):
            target = pathlib.Path(os.fsdecode(args[1] if what == "os.rename" else args[0]))
            if ".gone" in target.name:  # what is removed may be there again after a crash
                return
            if what == "os.rename" and ".tmp-" not in target.parent.name:
                self._look(pathlib.Path(args[0]))
            self.dirty[os.stat(target.parent).st_ino] = str(target.parent)

    def _look(self, source: pathlib.Path) -> None:
        self.renamed += 1
        paths, parent = [source], source.parent.stat().st_ino
        if source.is_dir():
            paths += source.iterdir()
            self.names.add(parent)
        elif parent in self.names:  # a tracker, which names what may not be there after a crash
            self.early.append(str(source))
        self.early += [str(path) for path in paths if path.stat().st_ino in self.dirty]
