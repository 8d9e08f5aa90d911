"""The journal: the results of all collectives that a rank calls outside of training loops, for its replacement.

A replacement runs the user's script from the top. On its way to the training loop it calls collectives that no other
rank calls any more: Lightning's, those of callbacks and metrics, the user's own. So every rank records the result of
each collective, and its replacement reads the results.

An entry belongs to one process group. It records what was called, on what shapes, and where in the code. If a call does
not match the next entry of its group, the script has done something else than before. That raises an error that says
what the predecessor did. There are two exceptions. A barrier has no result, so a replacement simply passes it. And a
replacement runs no sanity validation, so it may leave out entries from there (tests/control/test_journal.py). It sets
up validation data all the same, and reads those entries first while it does (`Journal.reading_left_out`).

[Note: segments]
A segment is the part of the script from one training loop to the next. A replacement of a rank that is lost in the n-th
loop reads n segments.
"""

import hashlib
import logging
import sys
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from types import FrameType
from typing import Any, Final, Literal, TypeAlias

from torch import Tensor

from lightning_replica.control import keys
from lightning_replica.control.blobs import Blobs
from lightning_replica.core import plain
from lightning_replica.errors import RecoveryError
from lightning_replica.stores.interface import Store

log = logging.getLogger(__name__)

Mode: TypeAlias = Literal["writing", "reading", "closed"]

SPOOL: Final = "LIGHTNING_REPLICA_SPOOL"
"""The environment variable with the supervisor's directory, which is deleted when the run is over."""

# The store accepts no value above 8 MiB, and keeps all values in the supervisor's memory.
_LARGE_BYTES = 256 * 1024
_PACKAGES = tuple(str(Path(sys.modules[name].__file__ or "").parent) for name in ("torch", "lightning_replica"))
_API = str(Path("torch", "distributed", "distributed_c10d"))  # what users call; the wrapper for logging is elsewhere
# Collectives with the same result on every member of the group: one member writes the result for all.
_SHARED = frozenset(("allreduce", "allreduce_coalesced", "broadcast", "allgather", "_allgather_base"))


@dataclass(frozen=True)
class Call:
    """One call of a collective.

    Attributes:
        operation: The process group's method.
        shapes: Dtypes and shapes of the tensors that the collective fills, such as "float32[2, 3]".
        function: The function of torch.distributed that the caller has called.
        where: The caller: file, line and function.
    """

    operation: str
    shapes: tuple[str, ...]
    function: str
    where: str

    def __str__(self) -> str:
        """Describe the call, for messages."""
        return f"`{self.function}` on {', '.join(self.shapes) or 'nothing'} in {self.where}"


def describe(operation: str, tensors: Sequence[Tensor]) -> Call:
    """Describe the collective that is being called at this moment.

    Args:
        operation: The process group's method.
        tensors: The tensors that the collective fills.
    """
    shapes = tuple(f"{str(tensor.dtype).removeprefix('torch.')}{list(tensor.shape)}" for tensor in tensors)
    frame: FrameType | None = sys._getframe(1)
    function = operation
    while frame is not None and frame.f_code.co_filename.startswith(_PACKAGES):
        if _API in frame.f_code.co_filename:
            function = frame.f_code.co_name
        frame = frame.f_back
    if frame is None:
        return Call(operation, shapes, function, "a torch thread")
    code = frame.f_code
    return Call(operation, shapes, function, f"{code.co_filename}:{frame.f_lineno}, {code.co_name}")


class Journal:
    """Writes or reads the results of collectives that this rank calls outside of training loops.

    Args:
        store: The supervisor's store.
        rank: This rank.
        reading: Number of segments to read; 0 for a rank that is no replacement.
        blobs: Where large entries are. Every process that may replace a rank can read them.
        kept: Whether entries are written at all; false if no rank will be replaced.

    Attributes:
        mode: Whether results of collectives are now written, read, or neither.
    """

    def __init__(
        self, store: Store, rank: int, reading: int = 0, blobs: Blobs | None = None, kept: bool = True
    ) -> None:
        self._store, self._rank, self._kept = store, rank, kept
        self._segment, self._segments_to_read = 0, reading
        self.mode: Mode = "closed"
        self._may_be_left_out: Callable[[], bool] = lambda: False
        self._reads_left_out_first = False
        self._next: Counter[tuple[str, str]] = Counter()  # by group and part
        self._blobs = blobs or Blobs(Path(tempfile.gettempdir()))
        self._open()

    def _open(self) -> None:
        if self._kept:
            self.mode = "reading" if self._segment < self._segments_to_read else "writing"

    def may_leave_out(self, now: Callable[[], bool]) -> None:
        """Let replacements leave out collectives that are called while ``now`` returns true."""
        self._may_be_left_out = now

    @contextmanager
    def reading_left_out(self) -> Iterator[None]:
        """Inside the block, read first the entries that may be left out.

        For a replacement that sets up validation data as its predecessor's sanity check did. If one line of code calls
        a collective for training and for validation data, it would otherwise read the result for training data.
        """
        self._reads_left_out_first = True
        try:
            yield
        finally:
            self._reads_left_out_first = False

    @property
    def on_the_way(self) -> bool:
        """Whether this replacement must pass the next training loop, to join the other ranks in a later one."""
        return self.mode == "reading" and self._segment + 1 < self._segments_to_read

    @property
    def place(self) -> str:
        """How far the script has come, in a replacement too: "before 2" and "in 2" for the second training loop."""
        return f"{'in' if self.mode == 'closed' else 'before'} {self._segment + 1}"

    def close(self) -> None:
        """Stop writing or reading, because a training loop begins, whose results no replacement needs."""
        if self.mode == "reading":
            self._report_leftovers()
        self.mode = "closed"

    def _report_leftovers(self) -> None:
        for group, part in list(self._next):
            entry = self._entry(self._key(group, part, self._next[group, part])) if part == "main" else None
            if entry is not None:
                log.warning(
                    "This replacement of rank %d left out a call that its predecessor made before the training loop:"
                    " %s. A script should do the same on every start.",
                    self._rank,
                    _call_of(entry),
                )

    def begin_segment(self) -> None:
        """Begin the next segment, because a training loop is over."""
        self._segment += 1
        self._next.clear()
        self._open()

    # Writing

    def reserve(self, group: str) -> str:
        """Return the key of the next entry of ``group``, when a collective begins: it may end later than others."""
        part = "optional" if self._may_be_left_out() else "main"
        return self._key(group, part, self._advance(group, part))

    def write(self, key: str, call: Call, tensors: Sequence[Tensor], first: bool) -> None:
        """Write an entry.

        Args:
            key: The key that `reserve` returned.
            call: The call of the collective.
            tensors: The tensors that the collective has filled.
            first: Whether this rank is the first one of its group.
        """
        data = plain.pack([tensor.detach() for tensor in tensors])
        entry: dict[str, Any] = {"call": {**asdict(call), "shapes": list(call.shapes)}}
        if len(data) <= _LARGE_BYTES:
            entry["data"] = data
        else:
            # Named by its digest, so that ranks can share it.
            entry["blob"] = f"{hashlib.blake2b(data, digest_size=16).hexdigest()}.set-up"
            if first or call.operation not in _SHARED:
                self._put_blob(entry["blob"], call, data)
        self._store.set(key, plain.pack(entry))

    def _put_blob(self, name: str, call: Call, data: bytes | memoryview) -> None:
        """Write a large value. Where it cannot be written, this run trains on, and replaces no rank."""
        try:
            self._blobs.put(name, data, self._rank)
        except OSError as error:
            why = (
                f"the result of {call}, of {len(data) / 2**20:.1f} MiB, could not be written for it: {error}."
                " The environment variable TMPDIR names the place; set it to a directory with more room."
            )
            self._store.set(keys.NO_REPLACEMENT, why)
            log.warning("A rank that is lost in this run cannot be replaced: %s", why)

    def write_failure(self, key: str, call: Call, error: Exception) -> None:
        """Write an entry of a call that was refused, as by a backend that cannot do it: the script may catch that.

        Args:
            key: The key that `reserve` returned.
            call: The call of the collective.
            error: What it has raised; a replacement's call raises a RuntimeError with the same text.
        """
        entry = {"call": {**asdict(call), "shapes": list(call.shapes)}, "error": str(error)}
        self._store.set(key, plain.pack(entry))

    # Reading

    def read(self, group: str, call: Call, any_shape: bool = False) -> list[Tensor]:
        """Return the result that ``call`` gave this rank's predecessor.

        Args:
            group: Key of the process group.
            call: The call of the collective.
            any_shape: Whether the predecessor may have called it on tensors of other shapes.

        Raises:
            RecoveryError: If the predecessor did not make this call next, or its result cannot be read.
            RuntimeError: If the call has failed in the predecessor.
        """
        found = self._find_optional(group, call, any_shape) if self._reads_left_out_first else None
        if found is not None:
            return found
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
            f"This replacement of rank {self._rank} called {call}, before the training loop. At this point, its"
            f" predecessor called {did}. A script must do the same on every start, up to the first batch of `fit`:"
            " nothing there may depend on the time, on files that the run itself writes, or on random numbers without"
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
        if "error" in entry:
            raise RuntimeError(entry["error"])
        if "data" in entry:
            data = entry["data"]
        else:
            try:
                data = self._blobs.get(entry["blob"])
            except RecoveryError as error:
                raise RecoveryError(
                    f"This replacement of rank {self._rank} cannot read the result of {_call_of(entry)}: {error}."
                ) from error
        found: list[Tensor] = plain.unpack(data)
        return found

    def _advance(self, group: str, part: str) -> int:
        self._next[group, part] += 1
        return self._next[group, part] - 1

    def _key(self, group: str, part: str, number: int) -> str:
        return keys.journal(self._rank, self._segment, group, part, number)


def _same(entry: dict[str, Any], call: Call, any_shape: bool) -> bool:
    said = _call_of(entry)
    return said == (replace(call, shapes=said.shapes) if any_shape else call)


def _call_of(entry: dict[str, Any]) -> Call:
    said = entry["call"]
    return Call(said["operation"], tuple(said["shapes"]), said["function"], said["where"])
