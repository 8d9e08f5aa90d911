"""The log of generations in the store, through which ranks agree that a new generation begins.

``generation/<k>`` exists from the moment at which generation k - 1 is over. Its value is the fault that ended it. Keys
are only added, with compare-and-set: a process that loses the race to begin k simply joins k. Every process that sees a
fault begins the next generation: the rank that raised, or a rank whose peer has gone. When a process dies, the
supervisor always begins one. So a dead process has no part in the newest generation, and nothing that it left behind is
mistaken for a report of its replacement.
"""

import os
import secrets
import socket
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any, Final, TypeAlias

from lightning_replica.control import keys
from lightning_replica.control.departures import has_ended
from lightning_replica.control.faults import UNREADABLE, Fault
from lightning_replica.control.gathering import Conclude, Gathering
from lightning_replica.control.phase import phase_of
from lightning_replica.control.untrusted import read
from lightning_replica.core.polling import poll
from lightning_replica.errors import ConfigurationError, Interrupted, RecoveryError
from lightning_replica.stores.interface import Store

Patience: TypeAlias = Callable[[float, Callable[[], list[int]]], None]
"""Called with the seconds waited so far and a function that returns the ranks that are missing. It may raise."""

_PATIENCE_EVERY_S: Final = 0.5  # it may ask about every rank


class Generations:
    """The log of generations, as one process sees it.

    On several nodes, the supervisor of each node copies the log to the store of the node, where its ranks read it. A
    rank writes to the log of the run, and waits until the entry has come to its node. So no process ever sees an older
    log than before.

    Args:
        store: The store that holds the log.
        current: The generation in which the process began.
        gathering: What this process gives to gatherings, and where it reads; None if there is only ``store``.

    Attributes:
        store: The store that holds the log.
        current: The generation that the process is in. No other object stores it.
        gathering: See above.
    """

    def __init__(self, store: Store, current: int = 0, gathering: Gathering | None = None) -> None:
        self.store, self.current = store, current
        self.gathering = Gathering(store) if gathering is None else gathering
        self._near = self.gathering.near
        self._patience: Patience = self._unless_ended

    def move_on(self) -> int:
        """Move this process to the newest generation, and return that."""
        self.current = self.newest(self.current)
        return self.current

    def wait_with(self, patience: Patience) -> None:
        """Make `share` call ``patience`` repeatedly while it waits."""
        self._patience = patience

    def _unless_ended(self, _: float, missing: Callable[[], list[int]]) -> None:
        """Do not wait for a rank that has ended by itself. In training, another process would take its place."""
        ended = [] if phase_of(self.store) == "fit" else [rank for rank in missing() if has_ended(self.store, rank)]
        if ended:
            ranks = f"Rank{'s' * (len(ended) > 1)} {', '.join(map(str, ended))}"
            raise ConfigurationError(
                f"{ranks} ended without an error, and other ranks wait for {'them' if len(ended) > 1 else 'it'}: `fit`,"
                " `validate`, `test` and `predict` are for all ranks."
            )

    def job(self) -> int:
        """Return a random number that is the same in all processes of this run, and hardly ever in another run."""
        return int(self.store.compare_set(keys.JOB, "", str(secrets.randbits(62))))

    def begun(self, generation: int) -> bool:
        """Return whether ``generation`` has begun."""
        return generation == 0 or self._near.check([keys.generation(generation)])

    def newest(self, known: int) -> int:
        """Return the newest generation; ``known`` is one that has begun."""
        while self.begun(known + 1):
            known += 1
        return known

    def begin(self, generation: int, fault: Fault) -> None:
        """Begin ``generation``, unless another process has begun it. Return when this process can read it.

        On several nodes, only the first rank of a node that wants this writes to the store of the run.
        """
        if self._near is self.store:
            self.store.compare_set(keys.generation(generation), "", fault.to_json())
            return
        own = _unique()
        if self._near.compare_set(keys.begins(generation), "", own) == own.encode():
            self.store.compare_set(keys.generation(generation), "", fault.to_json())
        self._wait_until_near(generation)

    def _wait_until_near(self, generation: int) -> None:
        """Wait until the supervisor has copied an entry of the log. If it does not, it ends this process.

        A rank of this node may have died before it has written the entry. Then the supervisor writes it.
        """
        poll(lambda: self.begun(generation))

    def begin_next(self, known: int, fault: Fault) -> int:
        """Begin a generation that no other process has begun, and return it."""
        while True:
            candidate = self.newest(known) + 1
            if self.begin_first(candidate, fault):
                self._wait_until_near(candidate)
                return candidate
            known = candidate

    def begin_first(self, generation: int, fault: Fault, note: str = "") -> bool:
        """Begin ``generation``; return False if another process has begun it.

        Args:
            generation: The generation after the newest that this process knows.
            fault: The fault.
            note: What supervisors tell each other with the fault.
        """
        # The value is unique, so that this process can see whether it has won the race.
        own = fault.to_json(_unique(), note)
        return self.store.compare_set(keys.generation(generation), "", own) == own.encode()

    def fault(self, generation: int) -> Fault:
        """Return the fault that ended the generation before ``generation``."""
        return self._entry(self._near, generation)[0]

    def fault_and_note(self, generation: int) -> tuple[Fault, str]:
        """Wait until ``generation`` begins, and return its fault, with the note for supervisors."""
        return self._entry(self.store, generation)

    def _entry(self, store: Store, generation: int) -> tuple[Fault, str]:
        key = keys.generation(generation)
        return read(key, store.get(key), Fault.with_note, UNREADABLE)

    def record_corruption(self, generation: int) -> None:
        """Record that wrong bits were found in the generation before ``generation``, whichever process begins that.

        This is not part of the fault that ends a generation: if several faults occur at a time, only one is recorded.
        """
        self.store.set(keys.corruption(generation), "")

    def has_corruption(self, generation: int) -> bool:
        """Return whether `record_corruption` was called for ``generation``."""
        return self.store.check([keys.corruption(generation)])

    def forbid_saving(self) -> None:
        """Record that no rank's shard can be trusted, so that this run writes no checkpoint any more."""
        self.store.set(keys.SAVING_FORBIDDEN, "")

    def saving_is_forbidden(self) -> bool:
        """Return whether `forbid_saving` was called."""
        return self.store.check([keys.SAVING_FORBIDDEN])

    def give_up(self, why: str, asked: bool = False, code: int = 0) -> None:
        """End the run: every rank that waits, or begins to wait, raises an error with the text ``why``.

        Args:
            why: The reason, as a sentence.
            asked: Whether the run was asked to end; otherwise it has failed.
            code: The exit code for the reason, if it is known.
        """
        first = self.verdict() is None
        if first and asked:
            self.store.set(keys.ASKED, "")
        if first and code:
            self.store.compare_set(keys.EXIT_CODE, "", str(code))
        self.store.compare_set(keys.VERDICT, "", why)

    def end(self, why: str, ranks: tuple[int, ...] = (), asked: bool = False, code: int = 0) -> None:
        """Give up the run, and wake all ranks that are blocked.

        Args:
            why: See `give_up`, as the next two.
            ranks: The ranks that are lost.
            asked: Whether the run was asked to end.
            code: The exit code.
        """
        self.give_up(why, asked, code)
        self.begin_next(0, Fault("end", ranks, why))

    def come_to_save(self, rank: int) -> None:
        """Record that a rank has left its training to write the last checkpoint."""
        self.store.set(keys.come_to_save(rank), "")

    def has_come_to_save(self, rank: int) -> bool:
        """Return whether `come_to_save` was called for a rank; until then, the others wait for it."""
        return self.store.check([keys.come_to_save(rank)])

    def leave_last_checkpoint(self, path: str) -> None:
        """Record the path of the last checkpoint of a run that was given up."""
        self.store.set(keys.GASP, path)

    def last_checkpoint(self) -> str | None:
        """Return the path that `leave_last_checkpoint` has recorded; None if there is none yet."""
        return self.store.get(keys.GASP).decode() if self.store.check([keys.GASP]) else None

    def exit_code(self) -> int:
        """Return the exit code of what ended the run; 0 if it is not known."""
        return int(self.store.get(keys.EXIT_CODE)) if self.store.check([keys.EXIT_CODE]) else 0

    def stop_was_requested(self) -> bool:
        """Return whether the run was given up because it was asked to end."""
        return self.store.check([keys.ASKED])

    def verdict(self) -> str | None:
        """Return why the run was given up; None if it was not."""
        return self._near.get(keys.VERDICT).decode(errors="replace") if self._near.check([keys.VERDICT]) else None

    def lost(self, generation: int) -> frozenset[int]:
        """Return the ranks that are lost for good by ``generation``. Valid only once the run has been given up."""
        faults = (self.fault(k) for k in range(1, generation + 1))
        return frozenset(rank for fault in faults if fault.detected == "end" for rank in fault.ranks)

    def wait_for(
        self, ready: Callable[[], bool], generation: int, timeout_s: float, what: str, given_up: bool = False
    ) -> None:
        """Poll until ``ready()`` returns true.

        Args:
            ready: Returns whether the wait is over.
            generation: The generation in which this rank waits.
            timeout_s: Time after which the wait fails, in seconds.
            what: What this rank waits for, for the message.
            given_up: Whether the wait is part of the work after the run was given up, so that the verdict is no error.

        Raises:
            Interrupted: If a generation after ``generation`` begins first.
            RecoveryError: If the run is given up, or ``timeout_s`` passes.
        """
        deadline = time.monotonic() + timeout_s

        def look_around() -> None:
            verdict = None if given_up else self.verdict()
            if verdict is not None:
                raise RecoveryError(verdict)
            if self.begun(generation + 1):
                raise Interrupted(self.fault(generation + 1).text)
            if time.monotonic() > deadline:
                raise RecoveryError(f"Timed out after {timeout_s:.0f} s waiting for {what} in generation {generation}.")

        poll(ready, look_around)

    def conclude(
        self,
        topic: str,
        rank: int,
        part: dict[str, Any],
        generation: int,
        ranks: Sequence[int],
        timeout_s: float,
        conclusion: Conclude,
        given_up: bool = False,
    ) -> Any:
        """Give ``part`` to a topic and return the conclusion from the parts of all ``ranks``, the same on all ranks.

        Args:
            topic: Name of the topic. A rank gives one part to it.
            rank: This rank.
            part: Plain data.
            generation: The generation in which this rank waits.
            ranks: The ranks that take part, in ascending order.
            timeout_s: Time after which the wait fails, in seconds.
            conclusion: See `gathering.Conclude`.
            given_up: See `wait_for`.

        Raises:
            Interrupted: If a newer generation begins first.
            RecoveryError: If a rank does not give its part in time, or if the run is given up.
            ConfigurationError: If such a rank has ended by itself, and is not replaced.
            ReplicaError: What ``conclusion`` has raised.
        """

        def unless_given_up(parts: list[dict[str, Any]]) -> Any:
            # Others may have given their part before they saw the verdict, and then stop.
            if not given_up and self.store.check([keys.VERDICT]):
                raise RecoveryError(self.store.get(keys.VERDICT).decode(errors="replace"))
            return conclusion(parts)

        self.gathering.give(topic, rank, part, ranks, unless_given_up)
        began = asked = time.monotonic()

        def missing() -> list[int]:
            return self.gathering.missing(topic, rank, ranks)

        def concluded() -> bool:
            nonlocal asked
            if self.gathering.has_result(topic):
                return True
            if time.monotonic() - asked > _PATIENCE_EVERY_S:
                asked = time.monotonic()
                self._patience(asked - began, missing)
            return False

        try:
            self.wait_for(concluded, generation, timeout_s, f"every rank's part in {topic!r}", given_up)
        except Interrupted:
            self.gathering.call_off(topic)
            raise
        except RecoveryError as error:
            gone = missing()
            self.gathering.call_off(topic)
            if not gone:
                raise
            raise RecoveryError(f"{error} Ranks that had not reported by then: {gone}.") from error
        return self.gathering.result(topic)

    def meet(
        self, name: str, rank: int, generation: int, ranks: Sequence[int], timeout_s: float, given_up: bool = False
    ) -> None:
        """Wait at a barrier that outlives its members: once all ranks have come, every rank passes it.

        A barrier of a process group can succeed on one rank and fail on another, because a third rank has already
        left. Here a rank that is called away calls the meeting off for all, unless all have come.
        """

        def wait(ready: Callable[[], bool]) -> None:
            self.wait_for(ready, generation, timeout_s, f"every rank to reach {name!r}", given_up)

        self.gathering.meet(keys.meet(name, generation), rank, ranks, wait)


def _unique() -> str:
    """Return a text that no other call returns, on any machine."""
    return f"{socket.gethostname()}.{os.getpid()}.{threading.get_ident()}.{time.monotonic_ns()}"
