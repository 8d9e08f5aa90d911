"""Whether a process is at work: what it and its descendants have used of the machine, as the kernel counts it."""

import contextlib
import os
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Final

_TICKS: Final = os.sysconf("SC_CLK_TCK") if hasattr(os, "sysconf") else 100
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
        tree = [process, *_descendants(process)]
        return cls(sum(map(_processor_s, tree)), sum(map(_file_bytes, tree)))

    def is_work_since(self, before: "Activity", seconds: float) -> bool:
        """Return whether more was used in ``seconds`` than a process that only waits would use."""
        busy = self.processor_s - before.processor_s > _AT_WORK * seconds
        return busy or self.file_bytes - before.file_bytes > _AT_WORK_BYTES


def state_of(process: int) -> str:
    """Return the state of a process as one letter, as in /proc; empty if there is no such process."""
    with contextlib.suppress(OSError, IndexError):
        return Path(f"/proc/{process}/stat").read_text().rsplit(")", 1)[1].split()[0]
    return ""


def _descendants(process: int) -> list[int]:
    found: list[int] = []
    with contextlib.suppress(OSError):
        for thread in os.listdir(f"/proc/{process}/task"):
            with contextlib.suppress(OSError):
                for child in Path(f"/proc/{process}/task/{thread}/children").read_text().split():
                    found += [int(child), *_descendants(int(child))]
    return found


def _processor_s(process: int) -> float:
    with contextlib.suppress(OSError, IndexError):
        fields = Path(f"/proc/{process}/stat").read_text().rsplit(")", 1)[1].split()
        return sum(map(int, fields[11:15])) / _TICKS  # its own, and that of children which have ended
    return 0.0


def _file_bytes(process: int) -> int:
    with contextlib.suppress(OSError):
        counted = Path(f"/proc/{process}/io").read_text()
        return sum(int(number) for number in re.findall(r"^[rw]char: (\d+)", counted, re.MULTILINE))
    return 0
