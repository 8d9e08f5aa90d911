"""What every collective gave this rank while the script was set up, for a process that has to take its place.

A replacement runs the user's script from the top. On its way to the training loop it meets collectives that no other
rank calls any more: Lightning's, those of callbacks and metrics, the user's own. So every rank writes down what each
collective gave it, and its replacement reads that.

An entry belongs to one process group and says what was called, on what shapes, and where in the code. A call that does
not match the next entry of its group is an error that says what the predecessor did: the script has done something
else. Two things are let pass. A barrier gives nothing, so a replacement passes it. And a replacement runs no sanity
validation, so entries from there may be left out (tests/recovery/test_journal.py).

[Note: segments]
The way from one training loop to the next is a segment. A replacement of a rank that is lost in the n-th loop reads n
segments.
"""

import hashlib
import logging
import sys
import tempfile
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from types import FrameType
from typing import Any, Final, Literal, TypeAlias

from torch import Tensor

from lightning_replica import plain
from lightning_replica.errors import RecoveryError
from lightning_replica.recovery.generation import Store

log = logging.getLogger(__name__)

Mode: TypeAlias = Literal["writing", "reading", "closed"]

SPOOL: Final = "LIGHTNING_REPLICA_SPOOL"
"""The variable that names the supervisor's directory, which goes when the run is over."""

# The store keeps no value above 8 MiB, and keeps all of them in the supervisor's memory.
_LARGE_BYTES = 256 * 1024
_PACKAGES = tuple(str(Path(sys.modules[name].__file__ or "").parent) for name in ("torch", "lightning_replica"))
_API = str(Path("torch", "distributed", "distributed_c10d"))  # what users call; its wrapper for logging is elsewhere
# Every member of the group gets the same: one of them writes it down for all.
_SHARED = frozenset(("allreduce", "allreduce_coalesced", "broadcast", "allgather", "_allgather_base"))


@dataclass(frozen=True)
class Call:
    """One collective, as it was called.

    Attributes:
        operation: The process group's method.
        shapes: Of the tensors that it fills, "float32[2, 3]".
        function: What the caller has called of torch.distributed.
        where: The caller: file, line and function.
    """

    operation: str
    shapes: tuple[str, ...]
    function: str
    where: str

    def __str__(self) -> str:
        """For messages."""
        return f"`{self.function}` on {', '.join(self.shapes) or 'nothing'} in {self.where}"


def describe(operation: str, tensors: Sequence[Tensor]) -> Call:
    """The collective that is being called just now, with the tensors that it fills."""
    shapes = tuple(f"{str(tensor.dtype).removeprefix('torch.')}{list(tensor.shape)}" for tensor in tensors)
    frame: FrameType | None = sys._getframe(1)
    function = operation
    while frame is not None and frame.f_code.co_filename.startswith(_PACKAGES):
        if _API in frame.f_code.co_filename:
            function = frame.f_code.co_name
        frame = frame.f_back
    if frame is None:
        return Call(operation, shapes, function, "a thread of torch's")
    code = frame.f_code
    return Call(operation, shapes, function, f"{code.co_filename}:{frame.f_lineno}, {code.co_name}")


class Journal:
    """Writes down, or reads back, what collectives gave this rank outside of training loops.

    Args:
        store: The supervisor's store.
        rank: This rank.
        reading: How many segments there are to read; 0 for a rank that is no replacement.
        spool: The directory for what is large; every process of this machine that may replace a rank can read it.
        kept: Whether anything is written down; not where no rank will be replaced.

    Attributes:
        mode: What happens to a collective now.
        may_be_left_out: Tells whether what is called now is left out by a replacement.
    """

    def __init__(self, store: Store, rank: int, reading: int = 0, spool: Path | None = None, kept: bool = True) -> None:
        self._store, self._rank, self._kept = store, rank, kept
        self._segment, self._segments_to_read = 0, reading
        self.mode: Mode = "closed"
        self.may_be_left_out: Callable[[], bool] = lambda: False
        self._next: Counter[tuple[str, str]] = Counter()  # by group and part
        self._spool = spool or Path(tempfile.gettempdir())
        self._open()

    def _open(self) -> None:
        if self._kept:
            self.mode = "reading" if self._segment < self._segments_to_read else "writing"

    @property
    def on_the_way(self) -> bool:
        """Whether the loop that this replacement is wanted in lies further ahead than the next one."""
        return self.mode == "reading" and self._segment + 1 < self._segments_to_read

    @property
    def place(self) -> str:
        """How far the script has come, also in a replacement: "before 2" and "in 2" for the second training loop."""
        return f"{'in' if self.mode == 'closed' else 'before'} {self._segment + 1}"

    def close(self) -> None:
        """A training loop begins: what its collectives give is not needed again."""
        if self.mode == "reading":
            self._tell_of_leftovers()
        self.mode = "closed"

    def _tell_of_leftovers(self) -> None:
        for group, part in list(self._next):
            entry = self._entry(self._key(group, part, self._next[group, part])) if part == "main" else None
            if entry is not None:
                log.warning(
                    "This replacement of rank %d has left out what its predecessor did on the way to the training loop:"
                    " %s. A script should do the same whenever it is started.",
                    self._rank,
                    _call_of(entry),
                )

    def begin_segment(self) -> None:
        """A training loop is over."""
        self._segment += 1
        self._next.clear()
        self._open()

    # Writing

    def reserve(self, group: str) -> str:
        """The key of the next entry of ``group``; taken when a collective begins, as it may end later than others."""
        part = "optional" if self.may_be_left_out() else "main"
        return self._key(group, part, self._advance(group, part))

    def write(self, key: str, call: Call, tensors: Sequence[Tensor], first: bool) -> None:
        """Write an entry.

        Args:
            key: From `reserve`.
            call: What was called.
            tensors: What it has filled.
            first: Whether this rank is the first of its group.
        """
        data = plain.pack([tensor.detach() for tensor in tensors])
        entry: dict[str, Any] = {"call": {**asdict(call), "shapes": list(call.shapes)}}
        if len(data) <= _LARGE_BYTES:
            entry["data"] = data
        else:
            entry["file"] = self._file(data, write=first or call.operation not in _SHARED)
        self._store.set(key, plain.pack(entry))

    def _file(self, data: bytes, write: bool) -> str:
        """Keep what is large in a file that is named by what it holds, so that ranks can share it."""
        path = self._spool / f"{hashlib.blake2b(data, digest_size=16).hexdigest()}.set-up"
        if write and not path.exists():
            part = path.with_suffix(f".{self._rank}")
            part.write_bytes(data)
            part.replace(path)
        return str(path)

    # Reading

    def read(self, group: str, call: Call, any_shape: bool = False) -> list[Tensor]:
        """Return what ``call`` has given this rank's predecessor.

        Args:
            group: Key of the process group.
            call: What is called.
            any_shape: Whether the predecessor may have called it on tensors of other shapes.

        Raises:
            RecoveryError: If the predecessor did something else.
        """
        number = self._next[group, "main"]
        entry = self._entry(self._key(group, "main", number))
        if entry is not None and _same(entry, call, any_shape):
            self._advance(group, "main")
            return self._content(entry)
        found = self._find_optional(group, call, any_shape)
        if found is not None:
            return found
        did = "no further collective" if entry is None else str(_call_of(entry))
        raise RecoveryError(
            f"This replacement of rank {self._rank} has called {call}, on the way to the training loop; its predecessor"
            f" there did: {did}. A script must do the same whenever it is started, up to the first batch of `fit`:"
            " let nothing there depend on the time, on files that the run itself writes, or on random numbers without"
            " a seed."
        )

    def _find_optional(self, group: str, call: Call, any_shape: bool) -> list[Tensor] | None:
        number = self._next[group, "optional"]
        while True:
            entry = self._entry(self._key(group, "optional", number))
            if entry is None:
                return None
            number += 1
            if _same(entry, call, any_shape):
                self._next[group, "optional"] = number
                return self._content(entry)

    def _entry(self, key: str) -> dict[str, Any] | None:
        return plain.unpack(self._store.get(key)) if self._store.check([key]) else None

    def _content(self, entry: dict[str, Any]) -> list[Tensor]:
        if "data" in entry:
            data = entry["data"]
        else:
            try:
                data = Path(entry["file"]).read_bytes()
            except OSError as error:
                raise RecoveryError(
                    f"This replacement of rank {self._rank} cannot read what {_call_of(entry)} gave: {error}."
                ) from error
        found: list[Tensor] = plain.unpack(data)
        return found

    def _advance(self, group: str, part: str) -> int:
        self._next[group, part] += 1
        return self._next[group, part] - 1

    def _key(self, group: str, part: str, number: int) -> str:
        return f"journal/{self._rank}/{self._segment}/{group}/{part}/{number}"


def _same(entry: dict[str, Any], call: Call, any_shape: bool) -> bool:
    said = _call_of(entry)
    return said == (replace(call, shapes=said.shapes) if any_shape else call)


def _call_of(entry: dict[str, Any]) -> Call:
    said = entry["call"]
    return Call(said["operation"], tuple(said["shapes"]), said["function"], said["where"])
