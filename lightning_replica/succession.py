"""What a process leaves to whoever may have to take its place, and what a replacement finds of its predecessor.

A replacement runs the script from the top. Until it has joined the others, in the training loop in which its
predecessor was lost, it is told what happened the last time: what collectives gave (recovery/journal.py), what earlier
loops came to (loop_results.py), and what was decided (`Succession.remembered`).
"""

import json
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

from torch import nn

from lightning_replica.launch.supervisor import NO_REPLACEMENT
from lightning_replica.loop_results import LoopResults
from lightning_replica.recovery.generation import Store
from lightning_replica.recovery.journal import Journal

_LOOP = "loop"  # store key: number of the newest training loop


class Succession:
    """One rank's part.

    Args:
        store: The supervisor's store.
        rank: This rank.
        world_size: Number of ranks.
        newborn: Whether this process is a replacement.
        spool: The directory for what is large.
        kept: Whether anything is left for a replacement.

    Attributes:
        newborn: Whether this process is a replacement that has not joined the others yet.
        journal: Collectives outside of training loops, written down or read back.
        loop: Training loops that have begun.
    """

    def __init__(self, store: Store, rank: int, world_size: int, newborn: bool, spool: Path | None, kept: bool) -> None:
        self._store, self._rank, self.newborn = store, rank, newborn
        self.journal = Journal(store, rank, int(store.get(_LOOP)) if newborn else 0, spool, kept)
        self.loop = 0
        self._results = LoopResults(spool if kept else None, rank, world_size)
        self._when_joined: list[Callable[[], None]] = []
        self._decided: Counter[str] = Counter()

    def leave_note(self, topic: str, plain: Any) -> None:
        """Leave plain data."""
        self._store.set(self._key(topic), json.dumps(plain))

    def read_note(self, topic: str) -> Any:
        """Return what this replacement's predecessor has left; None if it has left nothing."""
        key = self._key(topic)
        return json.loads(self._store.get(key)) if self._store.check([key]) else None

    def _key(self, topic: str) -> str:
        return f"note/{self._rank}/{topic}"

    def remembered(self, topic: str, decide: Callable[[], Any]) -> Any:
        """Return what ``decide`` returns, as plain data; in a replacement, what it has returned to its predecessor.

        Args:
            topic: What is decided; it may be decided again and again.
            decide: Called where nobody has decided yet.
        """
        self._decided[topic] += 1
        note = f"{topic}/{self._decided[topic]}"
        found = self.read_note(note) if self.newborn else None
        if found is None:
            found = decide()
            self.leave_note(note, found)
        return found

    def begin_loop(self) -> None:
        """A training loop is about to begin, on all ranks."""
        self.journal.close()
        self.loop += 1
        problem = self._results.write()
        if problem:
            self._store.set(NO_REPLACEMENT, f"this script has trained before. {problem}")
        self._store.set(_LOOP, str(self.loop))

    def end_loop(self, module: nn.Module, result: Callable[[], tuple[bytes, bytes]]) -> None:
        """It is over on all ranks.

        Args:
            module: What it has trained.
            result: Gives the replicated and the private part of a snapshot.
        """
        self._results.keep(self.loop, module, result)
        self.journal.begin_segment()

    def pass_loop(self, module: nn.Module) -> tuple[bytes, bytes] | None:
        """On a replacement that is wanted in a later loop: gives ``module`` the weights that this one came to.

        Returns:
            The replicated and the private part of the snapshot; None if there is a loop to make here.

        Raises:
            RecoveryError: If it is not known what the loop came to.
        """
        if not (self.newborn and self.journal.on_the_way):
            return None
        self.loop += 1
        self.journal.begin_segment()
        return self._results.read(self.loop, module)

    def join_loop(self) -> None:
        """This replacement has found its way to the loop in which it is wanted."""
        self.journal.close()
        self.loop += 1

    def when_joined(self, do: Callable[[], None]) -> None:
        """Have ``do`` called once this replacement has joined the others."""
        self._when_joined.append(do)

    def has_joined(self) -> None:
        """This replacement is one of the others now."""
        self.newborn = False
        doing, self._when_joined = self._when_joined, []
        for do in doing:
            do()
