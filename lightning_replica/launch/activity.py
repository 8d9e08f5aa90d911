"""Whether a process is at work: what it and its descendants have used of the machine, as the kernel counts it."""

import contextlib
from dataclasses import dataclass
from typing import Any, Final

import psutil

_AT_WORK: Final = 0.02  # share of a processor; threads that only poll now and then use less
_AT_WORK_BYTES: Final = 2**20


@dataclass(frozen=True)
class Activity:
    """What a process and its descendants have used so far.

    Attributes:
        processor_s: Time on a processor.
        file_bytes: Bytes read and written, also from and to caches; bytes sent over sockets are not counted.
    """

    processor_s: float = 0.0
    file_bytes: int = 0

    @classmethod
    def of(cls, process: int) -> "Activity":
        """Return what ``process`` and its descendants have used; zero where the kernel does not say."""
        tree = _tree(process)
        return cls(sum(map(_processor_s, tree)), sum(map(_file_bytes, tree)))

    def is_work_since(self, before: "Activity", seconds: float) -> bool:
        """Return whether more was used in ``seconds`` than a process that only waits would use."""
        busy = self.processor_s - before.processor_s > _AT_WORK * seconds
        return busy or self.file_bytes - before.file_bytes > _AT_WORK_BYTES


def _tree(process: int) -> list[psutil.Process]:
    with contextlib.suppress(psutil.Error):
        root = psutil.Process(process)
        return [root, *root.children(recursive=True)]
    return []


def _processor_s(process: psutil.Process) -> float:
    with contextlib.suppress(psutil.Error):
        return float(sum(process.cpu_times()[:4]))  # its own, and that of children which have ended
    return 0.0


def _file_bytes(process: psutil.Process) -> int:
    with contextlib.suppress(psutil.Error, AttributeError):  # only Linux counts them
        counted: Any = process.io_counters()
        return int(counted.read_chars + counted.write_chars)
    return 0
