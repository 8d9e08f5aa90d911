"""One rank's account of what has happened since the last good step, and the incident that is made from all accounts.

Every rank gives its account to a gathering when its recovery is complete; the last one concludes for all. The ranks
read the conclusion after the next good step: by then it is there, so no rank waits for another. What a rank finds
before that step not to be exact, it adds in the store.
"""

import json
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from datetime import datetime, timezone
from typing import Any, Final

from lightning_replica.control import keys
from lightning_replica.control.generation import Generations
from lightning_replica.core.recoverable import Kind
from lightning_replica.errors import ReplicaError
from lightning_replica.recovery.incident import Incident, Transferred
from lightning_replica.recovery.phases import Phase
from lightning_replica.recovery.recovery import Outcome

_WAITS_S: Final = 10.0  # for the conclusion, which on several nodes another thread brings


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
        generations: The log of generations; accounts are gathered through it.
        rank: This rank.
        world_size: Number of ranks.
        start_generation: The generation in which this process was started.
    """

    def __init__(self, generations: Generations, rank: int, world_size: int, start_generation: int) -> None:
        self._generations, self._rank, self._world_size = generations, rank, world_size
        self._start_generation = start_generation
        self._work: _Work | None = None
        self._open: _Open | None = None
        self._reported = 0  # number of incidents so far, as far as this process has seen

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
        topic, facts, ranks = keys.account(account.generation), self._facts(account), range(self._world_size)
        self._generations.gathering.give(topic, self._rank, facts, ranks, merged)
        return done

    def inexact(self, found: dict[str, str]) -> None:
        """Note what this rank has found not to be exact after the recovery. Called before the next commit.

        Args:
            found: The reasons, by name.
        """
        if self._open is not None and found:
            self._open.inexact.update(found)
            store, generation = self._generations.store, self._open.generation
            place = store.add(keys.inexact_count(generation), 1)
            store.set(keys.inexact(generation, place), json.dumps(found))

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
        known = [] if account is None else self._gathered(account, waits=False)
        if account is None:
            account = (
                _Open("", time.monotonic(), generation) if work is None else _Open(work.time, work.since, work.base)
            )
        account.recovery_s += time.monotonic() - (account.since if work is None else work.since)
        account.step, account.epoch, account.generation = step, epoch, self._generations.newest(generation)
        reporter = int(self._generations.store.compare_set(keys.FAILED, "", str(self._rank)))
        return self._incident(
            account, {**merged([*known, self._facts(account)]), **self._own(account, reporter)}, error
        )

    def _close(self, account: _Open, now: float) -> Incident:
        facts = merged(self._gathered(account, waits=True) or [self._facts(account)])
        if account.good_s is None:
            account.good_s = now - account.since
        return self._incident(account, facts, "")

    def _gathered(self, account: _Open, waits: bool) -> list[dict[str, Any]]:
        """Return what follows from the accounts of all ranks and what they have added; nothing if there is nothing.

        Args:
            account: The incident.
            waits: Whether to wait for it a moment. It is missing for good if a rank was lost before it gave its own.
        """
        gathering, topic = self._generations.gathering, keys.account(account.generation)

        def is_there() -> bool:
            return gathering.has_result(topic)

        try:
            if waits:
                what = "the accounts of all ranks"
                self._generations.wait_for(is_there, account.generation, _WAITS_S, what, given_up=True)
            elif not is_there():
                return []
            found = dict(gathering.result(topic))
        except ReplicaError:
            return []
        return [{**found, "inexact": {**found["inexact"], **self._added(account.generation)}}]

    def _added(self, generation: int) -> dict[str, str]:
        """Return what ranks have found not to be exact since they gave their accounts."""
        store, count = self._generations.store, self._generations.store.add(keys.inexact_count(generation), 0)
        places = [keys.inexact(generation, place) for place in range(1, count + 1)]
        found = [json.loads(store.get(key)) for key in places if store.check([key])]
        return {name: why for each in found for name, why in sorted(each.items())}

    def _incident(self, account: _Open, facts: dict[str, Any], error: str) -> Incident:
        self._reported = facts["reported"] + 1
        return Incident(
            number=self._reported,
            time=facts["time"],
            outcome="failed" if error else "recovered",
            error=error,
            faults=tuple(self._generations.fault(k) for k in range(facts["base"] + 1, account.generation + 1)),
            generation=account.generation,
            step=account.step,
            epoch=account.epoch,
            kind=account.kind,
            replaced=tuple(facts["replaced"]),
            forward=account.forward,
            moves=tuple(Transferred(**move) for move in facts["moves"]),
            phases_s=facts["phases"],
            recovery_s=facts["recovery_s"],
            first_good_step_s=None if error else account.good_s,
            redone_batches=facts["batches"],
            redone_s=facts["seconds"],
            reporter=facts["reporter"],
            inexact=facts["inexact"],
        )

    def _facts(self, account: _Open) -> dict[str, Any]:
        """Return this rank's account; `merged` returns one of the same form."""
        # Of replacements only: ranks are many.
        starts = [[self._rank, self._start_generation]] if self._start_generation else []
        return {
            **self._own(account, self._rank),
            "base": account.base,
            "starts": starts,
            "reported": self._reported,
            "moves": [asdict(move) for move in account.moves],
            "inexact": account.inexact,
        }

    def _own(self, account: _Open, reporter: int) -> dict[str, Any]:
        """Return what only the rank that reports says of itself."""
        return {
            "reporter": reporter,
            "time": account.time,
            "recovery_s": account.recovery_s,
            "phases": account.phases,
            "batches": account.batches,
            "seconds": account.seconds,
        }


def merged(accounts: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Return the account of all ranks together. A pure function.

    The first rank that was there before the faults reports, with its own times; ``replaced`` are those that were not.

    Args:
        accounts: Those of the ranks, or of several together.
    """
    base = min(each["base"] for each in accounts)
    starts = sorted(pair for each in accounts for pair in each["starts"])
    replaced = sorted({rank for rank, generation in starts if generation > base})
    survivors = [each for each in accounts if each["reporter"] not in replaced] or list(accounts)
    moves = {(move["target"], move["source"], json.dumps(move)): move for each in accounts for move in each["moves"]}
    return {
        **min(survivors, key=lambda each: int(each["reporter"])),
        "base": base,
        "starts": starts,
        "replaced": replaced,
        "reported": max(each["reported"] for each in accounts),
        "moves": [moves[key] for key in sorted(moves)],
        "inexact": {name: why for each in accounts for name, why in each["inexact"].items()},
    }


def _add(phases: dict[str, float], seconds: dict[Phase, float]) -> None:
    for phase, value in seconds.items():
        phases[phase.value] = phases.get(phase.value, 0.0) + value
