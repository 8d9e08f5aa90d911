"""The stacks of ranks, requested from outside: `faulthandler` writes them, without the GIL or the rank's help.

The signal is SIGURG. A process that has no handler for it ignores it, so it does no harm; batch systems, Lightning and
debuggers use other signals. (Go's runtime interrupts its threads with SIGURG for the same reasons.) Each rank writes
into an anonymous file of its own, which the supervisor reads through /proc.
"""

import contextlib
import faulthandler
import linecache
import os
import re
import signal
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final, Literal, TypeAlias

import psutil

from lightning_replica.core.machine import has_ended, is_stopped, status_of
from lightning_replica.core.user_code import is_users
from lightning_replica.launch.beacons import Slot

SIGNAL: Final = signal.SIGURG
PATIENCE_S = 1.0
_PAUSE_S: Final = 0.1  # `faulthandler` writes without a pause, so a text that has not grown for so long is complete
_STATES: Final = {
    psutil.STATUS_STOPPED: "stopped by a signal",
    psutil.STATUS_TRACING_STOP: "stopped by a tracer",
    psutil.STATUS_DISK_SLEEP: "in a system call that does not return",
}
_THREAD = re.compile(r"^(?:Current thread|Thread) 0x([0-9a-f]+)", re.MULTILINE)
_FRAME = re.compile(r'^  File "(.*)", line (\d+) in (.*)$', re.MULTILINE)
COLLECTIVES = tuple(
    f"torch/distributed/{name}.py" for name in ("distributed_c10d", "c10d_logger", "_functional_collectives")
)
_WRAPPER = "torch/distributed/c10d_logger.py"  # around every collective
_DISPATCH = ("torch/_ops.py", "torch/_library/autograd.py")  # between a functional collective and its wait, in C++
_DEBUGGERS = ("/pdb.py", "/bdb.py", "/pydevd.py", "/_pydevd_bundle/", "/debugpy/")

Finding: TypeAlias = Literal["busy", "silent", "collective", "debugger"]
"""What a rank without progress is doing. "silent": it could not write its stack. "collective": it waits for other ranks
in a collective of the user's own code."""


_answers: dict[int, int] = {}  # by process, as a fork inherits its parent's memory: the file that stacks are written to


def answer() -> int:
    """Make this process write its stacks whenever it gets `SIGNAL`, and return the descriptor of the file."""
    if os.getpid() not in _answers:
        _answers[os.getpid()] = os.memfd_create("lightning_replica_stacks")
        answer_again()
    return _answers[os.getpid()]


def answer_again() -> None:
    """Make this process answer again if it has answered before: Lightning sets all handlers back at the end of a fit.

    Python does not know of those that `faulthandler` has set, so it sets them to the default.
    """
    if os.getpid() in _answers:
        faulthandler.unregister(SIGNAL)
        faulthandler.register(SIGNAL, file=_answers[os.getpid()], all_threads=True, chain=False)


@dataclass(frozen=True)
class Frame:
    """One line of a stack."""

    file: str
    line: int
    function: str


@dataclass(frozen=True)
class Stack:
    """What is known of a rank that was asked for its stack.

    Attributes:
        text: Stacks of all its threads; empty if the rank did not answer.
        state: Status of its process, as `psutil` calls it; empty if there is none.
        traced: Whether a debugger is attached.
        frames: The stack of its main thread, innermost first.
        stopped: Stopped processes that the rank has started. It may wait for them, as for a DataLoader's workers.
    """

    text: str
    state: str = ""
    traced: bool = False
    frames: tuple[Frame, ...] = ()
    stopped: tuple[int, ...] = ()

    @property
    def finding(self) -> Finding:
        """What the rank is doing."""
        if self.traced or any(name in frame.file for frame in self.frames for name in _DEBUGGERS):
            return "debugger"
        if not self.frames:
            return "silent"
        return "collective" if _is_collective(self.frames) else "busy"

    def describe(self) -> str:
        """Return the stack of the main thread as text, without Python's imports, or the reason why there is none."""
        waits = "it may wait for process {}, which it has started and which a signal has stopped"
        lines = [f"  ({waits.format(process)})" for process in self.stopped]
        frames = [frame for frame in self.frames if not frame.file.startswith("<frozen importlib")]
        lines += [f'  File "{f.file}", line {f.line} in {f.function}' for f in frames]
        if not self.frames:
            lines.append(f"  (it cannot show its stack: {_STATES.get(self.state, 'it did not answer')})")
        return "\n".join(lines)

    @property
    def users(self) -> str:
        """The lines of the user's code in the stack of the main thread, innermost first, with what each has called."""
        frames = [frame for frame in self.frames if not frame.file.endswith(_WRAPPER)]
        called = ["", *(f", which calls {frame.function}" for frame in frames)]
        return "\n".join(
            f'  File "{frame.file}", line {frame.line} in {frame.function}{calls}'
            for frame, calls in zip(frames, called, strict=False)
            if is_users(frame.file)
        )


def _is_collective(frames: tuple[Frame, ...]) -> bool:
    """Return whether a main thread with these frames waits for other ranks.

    ``work.wait()`` of torch has no frame of its own; all other waits of Python have one, in threading.py and the like.
    """
    innermost = next((frame for frame in frames if not frame.file.endswith(_DISPATCH)), frames[0])
    if innermost.file.endswith(COLLECTIVES):
        return True
    # This package waits in slices, so one that is overdue there waits no more; but not where it puts a device in order.
    in_slices = (
        innermost.file.endswith("lightning_replica/core/pending_work.py") and innermost.function != "come_before"
    )
    return not in_slices and ".wait(" in linecache.getline(innermost.file, innermost.line)


def parse(text: str, thread: int) -> tuple[Frame, ...]:
    """Return the frames of one thread, innermost first, from the text that `faulthandler` wrote."""
    for match in _THREAD.finditer(text):
        if int(match[1], 16) == thread:
            following = _THREAD.search(text, match.end())
            section = text[match.end() : following.start() if following else len(text)]
            return tuple(
                Frame(_unescaped(file), int(line), _unescaped(function))
                for file, line, function in _FRAME.findall(section)
            )
    return ()


def _unescaped(name: str) -> str:
    """Return a name as it is: `faulthandler` writes ASCII, and escapes for all else."""
    return re.sub(r"\\(x[0-9a-f]{2}|u[0-9a-f]{4}|U[0-9a-f]{8})", lambda found: chr(int(found[1][1:], 16)), name)


def collect(slots: Mapping[int, Slot], send: Callable[[int], None], patience_s: float = PATIENCE_S) -> dict[int, Stack]:
    """Ask ranks for their stacks.

    Args:
        slots: The slots of the ranks to ask.
        send: Sends `SIGNAL` to a rank.
        patience_s: How long to wait for answers, in s; a stopped process is not waited for.
    """
    files = {rank: _open(slot) for rank, slot in slots.items()}
    sizes = {rank: os.fstat(file).st_size if file >= 0 else 0 for rank, file in files.items()}
    try:
        for rank, file in files.items():
            if file >= 0:
                send(rank)
        texts = dict.fromkeys(slots, b"")
        grew = dict.fromkeys(slots, 0.0)
        deadline = time.monotonic() + patience_s
        waiting = {rank for rank, file in files.items() if file >= 0}
        while waiting and time.monotonic() < deadline:
            time.sleep(0.02)
            for rank in tuple(waiting):
                text = os.pread(files[rank], 2**20, sizes[rank])
                if text != texts[rank]:
                    texts[rank], grew[rank] = text, time.monotonic()
                elif time.monotonic() > grew[rank] + _PAUSE_S if text else _writes_nothing(slots[rank].process):
                    waiting.discard(rank)
    finally:
        for file in files.values():
            if file >= 0:
                os.close(file)
    return {rank: _stack(slot, texts[rank].decode(errors="replace")) for rank, slot in slots.items()}


def _writes_nothing(process: int) -> bool:
    return is_stopped(process) or has_ended(process)


def save(stacks: Mapping[int, Stack], titles: Mapping[int, str], directory: Path) -> None:
    """Write a file with the stacks of each rank.

    Raises:
        OSError: If the directory cannot be written to.
    """
    directory.mkdir(parents=True, exist_ok=True)
    for rank, stack in stacks.items():
        (directory / f"rank{rank}.txt").write_text(f"{titles[rank]}\n\n{stack.text or stack.describe()}\n")


def _stack(slot: Slot, text: str) -> Stack:
    process = slot.process
    frames = tuple(replace(each, file=_resolved(each.file, process)) for each in parse(text, slot.thread))
    return Stack(text, status_of(process), _is_traced(process), frames, _stopped_children(process))


def _resolved(file: str, process: int) -> str:
    """Return the whole path of a file that code of a process was compiled from; its name alone if it has no path."""
    with contextlib.suppress(OSError):
        path = Path(os.readlink(f"/proc/{process}/cwd"), file)
        return str(path) if path.is_file() else file
    return file


def _open(slot: Slot) -> int:
    if slot.process:
        with contextlib.suppress(OSError):
            return os.open(f"/proc/{slot.process}/fd/{slot.stacks}", os.O_RDONLY | os.O_CLOEXEC)
    return -1


def _stopped_children(process: int) -> tuple[int, ...]:
    with contextlib.suppress(psutil.Error):
        return tuple(child.pid for child in psutil.Process(process).children() if is_stopped(child.pid))
    return ()


def _is_traced(process: int) -> bool:
    with contextlib.suppress(OSError):
        return re.search(r"^TracerPid:\s+[1-9]", Path(f"/proc/{process}/status").read_text(), re.MULTILINE) is not None
    return False
