"""Errors of ranks as a user reads them: every distinct one once, in one piece, and one line why the run ended.

All ranks run the same script, so a mistake in it is made by all of them, and the others fail because the first is gone.
Whichever rank comes first prints the traceback; what a rank met that others have caused is not printed. Each leaves a
line in the store, which the supervisor reads when the rank has ended.
"""

import hashlib
import json
import os
import sys
import time
import traceback
from collections.abc import Iterable
from dataclasses import asdict, dataclass

from lightning_replica.devices.gloo import is_collective_failure
from lightning_replica.errors import CollectiveError, Interrupted, RecoveryError
from lightning_replica.messages import with_bars
from lightning_replica.recovery.generation import Store

_OF_OTHERS = (CollectiveError, Interrupted, RecoveryError)


@dataclass(frozen=True)
class LastWords:
    """What a process says of its end.

    Attributes:
        rank: Its rank.
        own: Whether the error is its own, and not what the loss of another has caused.
        error: Type and message, in one line.
        place: Where the user's code was, ``file:line``; empty if that is not known.
    """

    rank: int
    own: bool
    error: str
    place: str

    @classmethod
    def of(cls, rank: int, error: BaseException) -> "LastWords":
        """Put an error into words."""
        own = not isinstance(error, _OF_OTHERS) and not is_collective_failure(error)
        said = str(error).strip().splitlines()
        return cls(rank, own, ": ".join([type(error).__name__, *said[:1]]), _place(error))

    def leave(self, store: Store, generation: int) -> None:
        """Leave them for the supervisor."""
        store.set(_key(self.rank, generation), json.dumps(asdict(self)))

    @classmethod
    def heard(cls, store: Store, processes: Iterable[tuple[int, int]]) -> "list[LastWords]":
        """Return what processes have left, own errors first.

        Args:
            store: The supervisor's store.
            processes: Rank and generation of each.
        """
        keys = [_key(rank, generation) for rank, generation in processes]
        found = [cls(**json.loads(store.get(key))) for key in keys if store.check([key])]
        return sorted(found, key=lambda words: not words.own)


def show(error: BaseException, rank: int, store: Store) -> None:
    """Print a traceback, unless a rank has printed the same."""
    text = "".join(traceback.format_exception(error))
    key, own = f"shown/{_digest(error)}", f"{rank}.{os.getpid()}.{time.monotonic_ns()}"
    if store.compare_set(key, "", own).decode() != own:
        return
    with_bars("".join(f"[rank {rank}] {line}\n" for line in text.rstrip().splitlines()), _write)


def _write(lines: str) -> None:
    out = sys.__stderr__ or sys.stderr  # not what torch's own hook puts in its place, to set another prefix before
    sys.stdout.flush()
    out.write(lines)  # at one go: other ranks write to the same place
    out.flush()


def _digest(error: BaseException) -> str:
    """The same for the same error at the same place, on any rank."""
    frames = [(frame.filename, frame.lineno) for frame in traceback.extract_tb(error.__traceback__)]
    return hashlib.sha256(repr((type(error).__name__, str(error), frames)).encode()).hexdigest()[:16]


def _place(error: BaseException) -> str:
    """The innermost frame that is not of an installed package; else the innermost."""
    frames = list(traceback.extract_tb(error.__traceback__))
    own = [frame for frame in frames if "site-packages" not in frame.filename and not frame.filename.startswith("<")]
    return f"{(own or frames)[-1].filename}:{(own or frames)[-1].lineno}" if frames else ""


def _key(rank: int, generation: int) -> str:
    return f"words/{rank}/{generation}"
