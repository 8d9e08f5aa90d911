"""Where a process was when a signal from inside ended it, such as the SIGABRT of a library.

Such a signal leaves no exception. `faulthandler` writes the stacks of the process to a file in the supervisor's spool,
and the supervisor reads it.
"""

import faulthandler
import re
import signal
from contextlib import suppress
from pathlib import Path
from typing import Final, TextIO

from lightning_replica.core.user_code import is_users
from lightning_replica.launch.stacks import COLLECTIVES, Frame, parse

SIGNALS: Final = frozenset({signal.SIGABRT, signal.SIGSEGV, signal.SIGBUS, signal.SIGFPE, signal.SIGILL})
_BEGINS: Final = "Fatal Python error: "
_CURRENT: Final = re.compile(r"^Current thread 0x([0-9a-f]+)", re.MULTILINE)
_SIZES: Final = "gloo ends a process like this when ranks call one collective with tensors of different sizes"
_files: list[TextIO] = []  # a file that is closed could not be written to


def write_down(spool: Path, process: int) -> None:
    """Make this process write its stacks into a directory when such a signal ends it, unless it prints them already.

    Args:
        spool: The directory.
        process: The id of this process.
    """
    if not faulthandler.is_enabled():
        with suppress(OSError):  # a full disk takes a message, not the rank
            _files.append(_path(spool, process).open("w", encoding="utf-8"))
            faulthandler.enable(_files[-1])


def write_down_again() -> None:
    """Make this process write its stacks again if it has done so before. See `stacks.answer_again`."""
    if _files and faulthandler.is_enabled():
        faulthandler.disable()
        faulthandler.enable(_files[-1])


def read(spool: Path, process: int, thread: int) -> tuple[Frame, ...]:
    """Return the stack of the thread that the signal came from, innermost first; nothing if it is not known.

    Args:
        spool: The directory.
        process: The id of the process.
        thread: The identity of its main thread, whose stack counts if a thread without Python code has crashed.
    """
    with suppress(OSError):
        _, _, text = _path(spool, process).read_text(encoding="utf-8", errors="replace").rpartition(_BEGINS)
        current = _CURRENT.search(text)
        return parse(text, int(current[1], 16) if current else thread)
    return ()


def describe(code: int, frames: tuple[Frame, ...]) -> str:
    """Return in words where a process was, as the end of a sentence; empty if it is not known.

    Args:
        code: The exit code of the process, -n for signal n.
        frames: What `read` has returned.
    """
    if not frames:
        return ""
    place = next((place for place, frame in enumerate(frames) if is_users(frame.file)), 0)
    own = frames[place]
    collective = any(frame.file.endswith(COLLECTIVES) for frame in frames[:place])
    sizes = f" ({_SIZES})" if code == -signal.SIGABRT and collective else ""
    return f" at {own.file}:{own.line} in {own.function}{sizes}"


def _path(spool: Path, process: int) -> Path:
    return spool / f"crash-{process}.txt"
