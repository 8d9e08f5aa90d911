"""Faults from outside: signals that `lightning-replica chaos` sends to processes of a job that it has started.

An injected fault strikes at a named point of a rank's own code. A fault from outside strikes at any instruction, and in
any process: ranks, their DataLoader workers, standbys, the supervisor.
"""

import json
import random
import signal
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Literal, TypeAlias, get_args

from lightning_replica.chaos.processes import Job, Member, Role
from lightning_replica.chaos.progress import Progress
from lightning_replica.core import checks
from lightning_replica.core.lines import append
from lightning_replica.errors import ConfigurationError

SignalKind: TypeAlias = Literal["kill", "stop", "segv", "bus", "abort", "term"]
OUTSIDE = "outside.jsonl"
SIGNALS: tuple[SignalKind, ...] = get_args(SignalKind)
ROLES: tuple[Role, ...] = get_args(Role)

_NUMBERS: dict[SignalKind, signal.Signals] = {
    "kill": signal.SIGKILL, "stop": signal.SIGSTOP, "segv": signal.SIGSEGV, "bus": signal.SIGBUS,
    "abort": signal.SIGABRT, "term": signal.SIGTERM,
}  # fmt: skip
_STEPS_APART = 2  # which ranks make after one fault before the next may strike, so that they can survive each fault


def fits(kind: SignalKind, role: Role) -> bool:
    """Return whether a job is expected to survive a signal, or to be started again after it.

    "stop" on a supervisor stops only the supervisor. "term" on a rank ends the whole run, as "term" on the supervisor
    does.
    """
    return kind != "stop" if role == "supervisor" else kind != "term"


@dataclass(frozen=True)
class Strike:
    """A signal that is to be sent.

    Attributes:
        kind: Kind of the signal.
        step: Steps that all ranks must have made first.
        delay: Time to wait after that, in durations of a step; may be a fraction.
        picks: Two numbers in [0, 1), which choose the role and one of its processes.
    """

    kind: SignalKind
    step: int
    delay: float
    picks: tuple[float, float]

    def __str__(self) -> str:
        return f"outside:{self.kind}:-:-:{self.step}"


@dataclass(frozen=True)
class Hit:
    """A signal that was sent.

    Attributes:
        kind: Kind of the signal.
        role: Role of the process.
        rank: Rank of the process, or of the rank that it worked for; None if there is no such rank.
        pid: Its process id.
        step: The last step that any rank had made by then.
        at_s: Seconds since the run began.
    """

    kind: SignalKind
    role: Role
    rank: int | None
    pid: int
    step: int
    at_s: float

    def __str__(self) -> str:
        return f"outside:{self.kind}:{'-' if self.rank is None else self.rank}:{self.role}:{self.step}"


def draw(
    seed: int, count: int, steps: int, kinds: Sequence[SignalKind], roles: Sequence[Role] = ROLES[:3]
) -> list[Strike]:
    """Draw ``count`` signals for a run of ``steps`` steps.

    Raises:
        ConfigurationError: If there is no such kind or role, or if a kind fits none of the roles.
    """
    for name, given, known in (("signals", kinds, SIGNALS), ("targets", roles, ROLES)):
        if not given:
            raise ConfigurationError(f"{name} is empty: give at least one of {', '.join(known)}.")
        for each in given:
            checks.choice(name, each, known)
    for kind in kinds:
        if not any(fits(kind, role) for role in roles):
            raise ConfigurationError(
                f"signals={kind!r} can hit none of targets={','.join(roles)!r}: 'stop' is for ranks, workers and"
                " standbys, 'term' for the supervisor."
            )
    dice = random.Random(f"{seed}/outside")
    due = sorted(dice.randrange(1, max(2, steps - _STEPS_APART)) for _ in range(count))
    return [Strike(dice.choice(kinds), step, dice.random(), (dice.random(), dice.random())) for step in due]


def chosen(strike: Strike, members: Sequence[Member], roles: Sequence[Role]) -> Member | None:
    """Return the process that a strike hits, out of those that run now; None if there is none.

    All roles that have processes are equally likely, and so are all processes of a role.
    """
    by_role: Mapping[Role, list[Member]] = {
        role: sorted((each for each in members if each.role == role), key=lambda each: (each.rank or 0, each.pid))
        for role in roles
        if fits(strike.kind, role)
    }
    present = [role for role in by_role if by_role[role]]
    if not present:
        return None
    those = by_role[present[int(strike.picks[0] * len(present))]]
    return those[int(strike.picks[1] * len(those))]


@dataclass
class Striker:
    """Sends the signals of one run when they are due. Its owner calls `look` repeatedly.

    Attributes:
        job: The processes of the run.
        progress: The progress of the ranks.
        strikes: The signals that are still to be sent.
        roles: The roles that may be hit.
        steps: Number of steps of the untouched run.
        step_s: Duration of one of these steps, in s.
        record: A file to which a line of JSON is added for every signal that is sent.
        hits: The signals that were sent.
        missed: The signals that were due but not sent: the run was too close to its end, or had no process to hit.
    """

    job: Job
    progress: Progress
    strikes: list[Strike]
    roles: Sequence[Role]
    steps: int
    step_s: float
    record: Path
    hits: list[Hit] = field(default_factory=list)
    missed: list[Strike] = field(default_factory=list)
    _begun: float = field(default_factory=time.monotonic)
    _due: float | None = None

    def look(self) -> None:
        """Send the next signal if it is due."""
        if not self.strikes or not self._has_come(self.strikes[0]):
            return
        now = time.monotonic()
        if self._due is None:
            self._due = now + self.strikes[0].delay * self.step_s
        if now < self._due:
            return
        strike, self._due = self.strikes.pop(0), None
        if self.progress.newest > self.steps - _STEPS_APART or not self._send(strike, now):
            self.missed.append(strike)  # after `fit` a rank cannot be replaced

    def _send(self, strike: Strike, now: float) -> bool:
        member = chosen(strike, self.job.members(self.progress.pids), self.roles)
        if member is None or not self.job.send(member, _NUMBERS[strike.kind]):
            return False
        at_s = round(now - self._begun, 3)
        self.hits.append(Hit(strike.kind, member.role, member.rank, member.pid, self.progress.newest, at_s))
        append(self.record, json.dumps(asdict(self.hits[-1])) + "\n")
        self.progress.expect_more(_STEPS_APART, anew=member.role == "supervisor")
        return True

    @property
    def starts(self) -> int:
        """How often the job may have to be started: once, and again after every fault that ends it."""
        return 1 + sum(hit.role == "supervisor" for hit in self.hits)

    def _has_come(self, strike: Strike) -> bool:
        self.progress.look()
        return self.progress.recovered and self.progress.oldest >= strike.step
