"""Errors of ranks as a user reads them: each distinct error once, in one piece, and one line why the run ended.

All ranks run the same script, so a mistake in it makes all of them fail, some only because the first is gone. The first
rank with an error prints the traceback. An error that another rank has caused is not printed. Each rank leaves a line
in the store, which the supervisor reads when the rank has ended.
"""

import hashlib
import json
import os
import sys
import time
import traceback
from collections.abc import Iterable
from dataclasses import asdict, dataclass

from lightning_replica.control import keys
from lightning_replica.core import streams
from lightning_replica.core.messages import with_bars
from lightning_replica.core.user_code import is_users
from lightning_replica.devices.exceptions import is_of_others
from lightning_replica.stores.interface import Store


@dataclass(frozen=True)
class ExitReport:
    """What a process reports about its own end.

    Attributes:
        rank: Its rank.
        own: Whether the error is the rank's own, and not caused by the loss of another rank.
        error: Type and message, in one line.
        place: Where the user's code was, ``file:line``; empty if unknown.
    """

    rank: int
    own: bool
    error: str
    place: str

    @classmethod
    def of(cls, rank: int, error: BaseException) -> "ExitReport":
        """Describe an error of a rank."""
        own = not is_of_others(error)
        said = str(error).strip().splitlines()
        return cls(rank, own, ": ".join([type(error).__name__, *said[:1]]), _place(error))

    def leave(self, store: Store, generation: int) -> None:
        """Write this to the store for the supervisor."""
        store.set(keys.exit_report(self.rank, generation), json.dumps(asdict(self)))

    @classmethod
    def read(cls, store: Store, processes: Iterable[tuple[int, int]]) -> "list[ExitReport]":
        """Return what processes have left in the store, own errors first.

        Args:
            store: The supervisor's store.
            processes: Rank and generation of each.
        """
        left = [keys.exit_report(rank, generation) for rank, generation in processes]
        found = [cls(**json.loads(store.get(key))) for key in left if store.check([key])]
        return sorted(found, key=lambda report: not report.own)


def show(error: BaseException, rank: int, store: Store) -> None:
    """Print a traceback, unless a rank has printed the same one."""
    text = "".join(traceback.format_exception(error))
    key, own = keys.shown(_digest(error)), f"{rank}.{os.getpid()}.{time.monotonic_ns()}"
    if store.compare_set(key, "", own).decode() != own:
        return
    with_bars("".join(f"[rank {rank}] {line}\n" for line in text.rstrip().splitlines()), _write)


def _write(lines: str) -> None:
    out = sys.__stderr__ or sys.stderr  # not sys.stderr, which torch's own hook replaces to add another prefix
    streams.flush()
    out.write(lines)  # in one write, as other ranks write to the same place
    out.flush()


def _digest(error: BaseException) -> str:
    """Return a digest that is the same for the same error at the same place, on any rank."""
    frames = [(frame.filename, frame.lineno) for frame in traceback.extract_tb(error.__traceback__)]
    return hashlib.sha256(repr((type(error).__name__, str(error), frames)).encode()).hexdigest()[:16]


def _place(error: BaseException) -> str:
    """Return the place of the innermost frame of the user's code, else of the innermost frame."""
    frames = list(traceback.extract_tb(error.__traceback__))
    own = [frame for frame in frames if is_users(frame.filename)]
    return f"{(own or frames)[-1].filename}:{(own or frames)[-1].lineno}" if frames else ""
