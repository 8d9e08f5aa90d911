"""How ranks agree that the world moves on: a log of generations in the store.

``generation/<k>`` exists from the moment in which generation k - 1 is over; its value is the fault that ended it. Keys
are only ever added, with compare-and-set, so that whoever loses the race to begin k simply joins it. Whoever sees a
fault begins the next generation: the rank that raised, a rank whose peer has gone, and always the supervisor when a
process dies, so that a dead process can have no part in the newest generation and nothing that it left behind is
mistaken for a report of its successor.
"""

import json
import os
import secrets
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any, Protocol

from lightning_replica import points
from lightning_replica.errors import Interrupted, RecoveryError
from lightning_replica.recovery.faults import Fault


class Store(Protocol):
    """The part of `torch.distributed.Store` that is used."""

    def set(self, key: str, value: Any) -> None: ...
    def get(self, key: str) -> bytes: ...
    def check(self, keys: list[str]) -> bool: ...
    def compare_set(self, key: str, expected: str, desired: str) -> bytes: ...
    def add(self, key: str, amount: int) -> int: ...


def _forever(_: float, __: Callable[[], list[int]]) -> None:
    """Waiting is bounded by its own time-out."""


class Generations:
    """The log of generations, as one process sees it.

    Attributes:
        patience: Called again and again while `share` waits, with the seconds waited so far and a function that tells
            which ranks are missing; it may raise.
    """

    def __init__(self, store: Store) -> None:
        self.store = store
        self.patience: Callable[[float, Callable[[], list[int]]], None] = _forever

    def job(self) -> int:
        """A number that every process of this run gets, and hardly one of another run."""
        return int(self.store.compare_set("job", "", str(secrets.randbits(62))))

    def begun(self, generation: int) -> bool:
        """Whether ``generation`` has begun."""
        return generation == 0 or self.store.check([_key(generation)])

    def newest(self, known: int) -> int:
        """The newest generation, not before ``known``."""
        while self.begun(known + 1):
            known += 1
        return known

    def begin(self, generation: int, fault: Fault) -> None:
        """Begins ``generation``, unless someone has."""
        self.store.compare_set(_key(generation), "", fault.to_json())

    def begin_next(self, known: int, fault: Fault) -> int:
        """Begins one that nobody has begun yet; returns it."""
        while True:
            candidate = self.newest(known) + 1
            # A value nobody else writes tells the winner of the race from the losers.
            own = fault.to_json(token=f"{os.getpid()}.{threading.get_ident()}.{time.monotonic_ns()}")
            if self.store.compare_set(_key(candidate), "", own) == own.encode():
                return candidate
            known = candidate

    def fault(self, generation: int) -> Fault:
        """What ended the generation before ``generation``."""
        return Fault.from_json(self.store.get(_key(generation)).decode())

    def taint(self, generation: int) -> None:
        """Says that wrong bits were found in the generation before ``generation``, whoever else begins that.

        Not part of the fault that ends a generation: of several faults at a time only one is written down.
        """
        self.store.set(f"tainted/{generation}", "")

    def is_tainted(self, generation: int) -> bool:
        """See `taint`."""
        return self.store.check([f"tainted/{generation}"])

    def spoil(self) -> None:
        """Says that nobody's shard can be trusted: of this run nothing is to be written any more."""
        self.store.set("spoiled", "")

    def is_spoiled(self) -> bool:
        """See `spoil`."""
        return self.store.check(["spoiled"])

    def give_up(self, why: str, asked: bool = False) -> None:
        """Ends the run: every rank that waits, or will wait, gets ``why`` as an error.

        Args:
            why: A sentence.
            asked: Whether somebody wants it to end; otherwise it has failed.
        """
        if asked and self.verdict() is None:
            self.store.set("asked", "")
        self.store.compare_set("verdict", "", why)

    def was_asked(self) -> bool:
        """Whether the run was given up because somebody wanted that."""
        return self.store.check(["asked"])

    def verdict(self) -> str | None:
        """Why the run has ended; None while it goes on."""
        return self.store.get("verdict").decode() if self.store.check(["verdict"]) else None

    def lost(self, generation: int) -> frozenset[int]:
        """The ranks that are gone for good by ``generation``; only once the run has been given up."""
        faults = (self.fault(k) for k in range(1, generation + 1))
        return frozenset(rank for fault in faults if fault.detected == "end" for rank in fault.ranks)

    def wait_for(
        self, ready: Callable[[], bool], generation: int, timeout_s: float, what: str, given_up: bool = False
    ) -> None:
        """Polls until ``ready()``.

        Args:
            ready: Whether there is nothing to wait for.
            generation: In which this rank waits.
            timeout_s: After which it fails.
            what: For the message.
            given_up: Whether the run has been given up, and what is waited for comes after that.

        Raises:
            Interrupted: If a generation after ``generation`` begins first.
            RecoveryError: If the run is given up, or ``timeout_s`` passes.
        """
        deadline = time.monotonic() + timeout_s
        pause_s = 0.001
        try:
            while not ready():
                points.waits()
                verdict = None if given_up else self.verdict()
                if verdict is not None:
                    raise RecoveryError(verdict)
                if self.begun(generation + 1):
                    raise Interrupted(self.fault(generation + 1).text)
                if time.monotonic() > deadline:
                    raise RecoveryError(f"Waited {timeout_s:.0f} s for {what} in generation {generation}.")
                time.sleep(pause_s)
                pause_s = min(0.02, 1.5 * pause_s)
        finally:
            points.goes_on()

    def share(
        self,
        topic: str,
        rank: int,
        plain: dict[str, Any],
        generation: int,
        ranks: Sequence[int],
        timeout_s: float,
        given_up: bool = False,
    ) -> list[dict[str, Any]]:
        """Leaves ``plain`` for everyone and returns what each of ``ranks`` has left under ``topic``.

        Raises:
            Interrupted: If the world moves on meanwhile.
            RecoveryError: If a rank does not come in time.
        """
        self.store.set(f"{topic}/{rank}", json.dumps(plain))
        keys = [f"{topic}/{other}" for other in ranks]

        began = time.monotonic()

        def missing() -> list[int]:
            return [rank for rank, key in zip(ranks, keys, strict=True) if not self.store.check([key])]

        def complete() -> bool:
            if self.store.check(keys):
                return True
            self.patience(time.monotonic() - began, missing)
            return False

        try:
            self.wait_for(complete, generation, timeout_s, f"every rank's part in {topic!r}", given_up)
        except RecoveryError as error:
            raise RecoveryError(f"{error} Missing: ranks {missing()}.") from error
        verdict = None if given_up else self.verdict()
        if verdict is not None:  # others may have left their part before they saw it, and will not come any further
            raise RecoveryError(verdict)
        return [json.loads(self.store.get(key)) for key in keys]

    def meet(self, name: str, generation: int, world_size: int, timeout_s: float, given_up: bool = False) -> None:
        """A barrier that outlives its members: once all have come, it is passed for good.

        Unlike a barrier of a process group it cannot succeed on one rank and fail on another because a third has
        already gone home.
        """
        key = f"meet/{name}/{generation}"
        self.store.add(key, 1)

        def complete() -> bool:
            return self.store.add(key, 0) >= world_size

        try:
            self.wait_for(complete, generation, timeout_s, f"every rank at {name!r}", given_up)
        except Interrupted:
            if not complete():
                raise


def _key(generation: int) -> str:
    return f"generation/{generation}"
