"""One rank's account of what has happened since the last good step, and the incident that is made from all accounts.

Every rank writes its account to the store when its recovery is complete. It reads the accounts of the other ranks after
the next good step: by then all ranks have written theirs, so no rank waits for another.
"""

import json
import time
from dataclasses import asdict, dataclass, field
from datetime import datetime, timezone
from typing import Any

from lightning_replica.control import keys
from lightning_replica.control.generation import Generations
from lightning_replica.core.recoverable import Kind
from lightning_replica.recovery.incident import Incident, Transferred
from lightning_replica.recovery.phases import Phase
from lightning_replica.recovery.recovery import Outcome


@dataclass
class _Work:
    """What this rank was doing when a fault came."""

    time: str
    since: float
    base: int  # the generation that the fault has ended
    step: int
    batches: int
    seconds: float


@dataclass
class _Open:
    """What this rank has noted about the incident under way."""

    time: str
    since: float
    base: int
    step: int = 0
    kind: Kind = "batch"
    forward: tuple[int, ...] = ()
    epoch: int = 0
    generation: int = 0
    recovery_s: float = 0.0
    phases: dict[str, float] = field(default_factory=dict)
    moves: list[Transferred] = field(default_factory=list)
    batches: int = 0
    seconds: float = 0.0
    good_s: float | None = None
    inexact: dict[str, str] = field(default_factory=dict)


class Account:
    """Keeps this rank's account.

    Args:
        generations: The log of generations; accounts are exchanged through its store.
        rank: This rank.
        world_size: Number of ranks.
        born: The generation that this process was born into.
    """

    def __init__(self, generations: Generations, rank: int, world_size: int, born: int) -> None:
        self._generations, self._rank, self._world_size, self._born = generations, rank, world_size, born
        self._work: _Work | None = None
        self._open: _Open | None = None
        self._told = 0  # number of incidents so far, as far as this process has seen

    def fault(self, base: int, step: int, batches: int, seconds: float) -> None:
        """Note that a fault has stopped this rank.

        Args:
            base: The generation that is over.
            step: Updates applied so far.
            batches: Batches begun since the last of these updates.
            seconds: Seconds spent on these batches.
        """
        now = datetime.now(timezone.utc).isoformat(timespec="milliseconds")
        self._work = _Work(now, time.monotonic(), base, step, batches, seconds)

    def went_on(self, outcome: Outcome, epoch: int) -> list[Incident]:
        """Note that recovery is complete and training resumes.

        Returns:
            The previous incident, in a list, if a good step lies between the two; otherwise an empty list.
        """
        work, self._work = self._work, None
        if work is None:
            raise RuntimeError("a recovery completed without a fault")
        before = self._open
        done = []
        if before is not None and outcome.plan.step > before.step:
            done = [self._close(before, work.since)]
            work.base = before.generation
            self._open = None
        account = self._open = self._open or _Open(work.time, work.since, work.base)
        plan = outcome.plan
        account.step, account.kind, account.forward = plan.step, plan.kind, plan.forward
        account.epoch, account.generation, account.good_s = epoch, outcome.generation, None
        account.recovery_s += outcome.timeline.total_s
        _add(account.phases, outcome.timeline.seconds)
        account.moves += outcome.moves
        if plan.step <= work.step:  # otherwise these batches have led to a step
            account.batches += work.batches
            account.seconds += work.seconds
        self._give(account)
        return done

    def _give(self, account: _Open) -> None:
        self._generations.store.set(keys.account(account.generation, self._rank), json.dumps(self._facts(account)))

    def inexact(self, found: dict[str, str]) -> None:
        """Note what this rank has found not to be exact after the recovery. Called before the next commit.

        Args:
            found: The reasons, by name.
        """
        if self._open is not None and found:
            self._open.inexact.update(found)
            self._give(self._open)

    def good_step(self) -> None:
        """Note that this rank has completed a step."""
        if self._open is not None and self._open.good_s is None:
            self._open.good_s = time.monotonic() - self._open.since

    def close(self, step: int | None) -> list[Incident]:
        """Close the incident under way if it is over. Return it in a list, which is empty if there is none.

        Args:
            step: The step that all ranks have completed; None at the end of training.
        """
        account = self._open
        if account is None or (step is not None and step <= account.step):
            return []
        self._open = None
        return [self._close(account, time.monotonic())]

    def failed(self, error: str, generation: int, step: int, epoch: int) -> Incident:
        """Close the incident under way as the last one, because the run has failed, and return it."""
        work, account = self._work, self._open
        self._work = self._open = None
        facts = {} if account is None else self._collect(account.generation)
        if account is None:
            account = (
                _Open("", time.monotonic(), generation) if work is None else _Open(work.time, work.since, work.base)
            )
        account.recovery_s += time.monotonic() - (account.since if work is None else work.since)
        account.step, account.epoch, account.generation = step, epoch, self._generations.newest(generation)
        facts[self._rank] = self._facts(account)
        teller = int(self._generations.store.compare_set(keys.FAILED, "", str(self._rank)))
        return self._incident(account, facts, teller, error)

    def _close(self, account: _Open, now: float) -> Incident:
        facts = self._collect(account.generation)
        base = min(each["base"] for each in facts.values())
        there = [rank for rank, each in facts.items() if each["born"] <= base]
        if account.good_s is None:
            account.good_s = now - account.since
        return self._incident(account, facts, min(there or facts), "")

    def _incident(self, account: _Open, facts: dict[int, dict[str, Any]], teller: int, error: str) -> Incident:
        told = facts.get(teller, self._facts(account))
        base = min(each["base"] for each in facts.values())
        number = self._told = max(each["told"] for each in facts.values()) + 1
        moves = sorted((Transferred(**move) for each in facts.values() for move in each["moves"]), key=_by_target)
        return Incident(
            number=number,
            time=told["time"],
            outcome="failed" if error else "recovered",
            error=error,
            faults=tuple(self._generations.fault(k) for k in range(base + 1, account.generation + 1)),
            generation=account.generation,
            step=account.step,
            epoch=account.epoch,
            kind=account.kind,
            replaced=tuple(rank for rank, each in sorted(facts.items()) if each["born"] > base),
            forward=account.forward,
            moves=tuple(moves),
            phases_s=told["phases"],
            recovery_s=told["recovery_s"],
            first_good_step_s=None if error else account.good_s,
            redone_batches=told["batches"],
            redone_s=told["seconds"],
            teller=teller,
            inexact={name: why for _, each in sorted(facts.items()) for name, why in each["inexact"].items()},
        )

    def _facts(self, account: _Open) -> dict[str, Any]:
        return {
            "time": account.time,
            "base": account.base,
            "born": self._born,
            "told": self._told,
            "recovery_s": account.recovery_s,
            "phases": account.phases,
            "moves": [asdict(move) for move in account.moves],
            "batches": account.batches,
            "seconds": account.seconds,
            "inexact": account.inexact,
        }

    def _collect(self, generation: int) -> dict[int, dict[str, Any]]:
        accounts = {rank: keys.account(generation, rank) for rank in range(self._world_size)}
        store = self._generations.store
        return {rank: json.loads(store.get(key)) for rank, key in accounts.items() if store.check([key])}


def _add(phases: dict[str, float], seconds: dict[Phase, float]) -> None:
    for phase, value in seconds.items():
        phases[phase.value] = phases.get(phase.value, 0.0) + value


def _by_target(move: Transferred) -> tuple[int, int]:
    return move.target, move.source
