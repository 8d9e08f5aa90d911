"""What the supervisor decides: a state machine without processes, stores or clocks.

A run is in one `State`. The supervisor passes each event to `Policy`, with the `Facts` of the moment. `Policy` returns
actions, which the supervisor carries out in order. tests/launch/test_policy.py covers all of it and starts no process.

| from | event | to |
|---|---|---|
| RUNNING, STOPPING | a rank ends that can be replaced, or a node | the same |
| RUNNING | a rank ends that cannot be replaced; ranks can save | SAVING |
| RUNNING | a rank ends that cannot be replaced; ranks cannot save, or need not | ENDING |
| RUNNING, SAVING | a first signal; ranks can save | STOPPING |
| RUNNING | a signal; ranks cannot save | ENDING |
| STOPPING | half of the grace is over, or a rank ends that cannot be replaced | SAVING |
| STOPPING, SAVING | the grace is over, or a second signal | KILLED |
| ENDING | the same, if the first signal led to STOPPING | KILLED |
"""

import enum
import math
import signal
from dataclasses import dataclass
from typing import Final, TypeAlias

from lightning_replica.control.faults import Fault
from lightning_replica.control.phase import Phase
from lightning_replica.core.options import RecoveryOptions
from lightning_replica.exit_codes import GASP_WRITTEN, GAVE_UP, NOTHING_SAVED

END_S: Final = 10.0  # between the signal to end and SIGKILL
END_EARLY_S: Final = 2.0  # the same before the first batch, where nothing is lost
COPY_S: Final = 1.0  # a signal that follows another one so soon is a copy of it


class State(enum.Enum):
    """How far a run is on the way to its end."""

    RUNNING = enum.auto()  # ranks start or train; a rank that is lost in training is replaced
    STOPPING = enum.auto()  # a signal has asked for the end: ranks agree to save and end within the grace
    SAVING = enum.auto()  # the run is given up; surviving ranks write the last checkpoint, if they can
    ENDING = enum.auto()  # the run is given up; ranks end
    KILLED = enum.auto()  # the remaining ranks are killed


@dataclass(frozen=True)
class Facts:
    """The situation at the moment of an event.

    Attributes:
        phase: Where the run is.
        given_up: Why the run has been given up, by a supervisor or by a rank; empty if it has not.
        code: The exit code for that, if another supervisor has given it up.
        no_replacement: Why a replacement could not get to where the run is; empty if it could.
    """

    phase: Phase
    given_up: str = ""
    code: int = 0
    no_replacement: str = ""

    @property
    def in_fit(self) -> bool:
        """Whether a lost rank can be replaced, and the run saved."""
        return self.phase == "fit"


@dataclass(frozen=True)
class RankEnd:
    """The end of a rank's process.

    Attributes:
        rank: The rank.
        code: Its exit code, -n for signal n.
        how: How it ended, in words.
        hung: Whether it was killed because it hung.
        where: Where the rank was, in words.
        again: Whether the process before it ended in the same way at the same place.
    """

    rank: int
    code: int
    how: str
    hung: bool = False
    where: str = ""
    again: bool = False


@dataclass(frozen=True)
class Say:
    """The action: print a message for the user."""

    text: str


@dataclass(frozen=True)
class Replace:
    """The action: begin a generation with this fault, and start another process for the rank."""

    rank: int
    fault: Fault
    number: int


@dataclass(frozen=True)
class Relocate:
    """The action: begin a generation with this fault, in which another node starts the ranks of a lost node."""

    fault: Fault
    number: int


@dataclass(frozen=True)
class GiveUp:
    """The action: record that the run is given up, and wake all ranks that wait."""

    why: str
    ranks: tuple[int, ...] = ()
    asked: bool = False
    code: int = 0


@dataclass(frozen=True)
class Send:
    """The action: send a signal to all ranks."""

    signum: signal.Signals


@dataclass(frozen=True)
class EndRanks:
    """The action: send a signal to ranks that still run after ``after_s``, and kill them if they run `END_S` longer."""

    signum: signal.Signals
    after_s: float = 0.0


@dataclass(frozen=True)
class EndAbsent:
    """The action: kill ranks that have not come to save, if others have: those may hold every shard."""


Action: TypeAlias = Say | Replace | Relocate | GiveUp | Send | EndRanks | EndAbsent
Actions: TypeAlias = tuple[Action, ...]


class Policy:
    """Makes the decisions for one run.

    Args:
        options: What the user has chosen about recovery.

    Attributes:
        options: The same; replaced once ranks have reported what callbacks say.
        state: How far the run is on the way to its end.
        code: The exit code of what failed first; 0 if nothing has failed.
        restarts: Number of processes that were replaced.
    """

    def __init__(self, options: RecoveryOptions) -> None:
        self.options, self.state = options, State.RUNNING
        self.code = self.restarts = 0
        self._signal: signal.Signals | None = None
        self._signalled_at = 0.0
        self._saves = False  # ranks write the last checkpoint, or have tried to

    @property
    def restarts_left(self) -> int:
        """The number of processes that may still be replaced."""
        return self.options.max_restarts - self.restarts

    @property
    def keeps_time(self) -> bool:
        """Whether `time_passes` has something to decide: a signal has asked for the end."""
        return self._signal is not None

    def watches(self, facts: Facts) -> bool:
        """Return whether ranks that hang are killed. They are not once ranks only end."""
        return self._saves or not (self.code or facts.given_up)

    def count(self, restarts: int) -> None:
        """Take note of how many processes and nodes were replaced in this run, also by other supervisors."""
        self.restarts = max(self.restarts, restarts)

    def rank_ended(self, end: RankEnd, facts: Facts) -> Actions:
        """Decide what to do when a rank's process has ended."""
        if end.code == 0 and (not facts.in_fit or facts.given_up):
            return ()
        code = GAVE_UP if end.hung and not facts.in_fit else 128 - end.code if end.code < 0 else end.code or 1
        fails = self._cannot_be_replaced("a rank", (end.rank,), end.how, code, facts, end.again and end.where)
        if fails:
            return fails
        self.restarts += 1
        fault = Fault("hang" if end.hung else "death", (end.rank,), end.how)
        return (Replace(end.rank, fault, self.restarts),)

    def node_ended(self, ranks: tuple[int, ...], how: str, facts: Facts) -> Actions:
        """Decide what to do when a node and all its ranks are lost.

        Args:
            ranks: The ranks.
            how: How the node was lost, in words.
            facts: The situation now.
        """
        fails = self._cannot_be_replaced("a node", ranks, how, GAVE_UP, facts)
        if fails:
            return fails
        self.restarts += 1
        return (Relocate(Fault("death", ranks, how), self.restarts),)

    def no_node_came(self, ranks: tuple[int, ...], how: str, facts: Facts) -> Actions:
        """Decide what to do when no node has come in time to take the place of a lost one. See `node_ended`."""
        waited = f"{self.options.rendezvous_timeout_s:g} s (rendezvous_timeout_s)"
        return self.give_up(f"{how}, and no other node has come within {waited}.", facts, ranks)

    def give_up(self, how: str, facts: Facts, ranks: tuple[int, ...] = ()) -> Actions:
        """Decide what to do when the run cannot go on. Ranks that train can still save.

        Args:
            how: Why it cannot, in words.
            facts: The situation now.
            ranks: Ranks that are lost.
        """
        return self._fail(how, GAVE_UP, facts, ranks)

    def _cannot_be_replaced(
        self, what: str, ranks: tuple[int, ...], how: str, code: int, facts: Facts, again: str | bool = False
    ) -> Actions:
        """Return the actions that end the run if lost ranks cannot be replaced; nothing if they can.

        Args:
            what: What is lost: a rank or a node.
            ranks: The ranks.
            how: How they were lost, in words.
            code: The exit code that stands for that.
            facts: The situation now.
            again: Where the rank was, in words, if the process before it ended in the same way at the same place.
        """
        if self.code or facts.given_up:
            return self._fail(how, facts.code or code, facts, ranks if self.options.gasp else ())
        if not self.options.recovery:
            return self._fail(f"{how}. With recovery=False, this ends the run.", code, facts)
        if not facts.in_fit:
            where = "before its first batch" if facts.phase == "set-up" else "outside of training"
            return self._fail(f"{how} {where}, where {what} cannot be replaced.", code, facts)
        if again:
            return self._fail(f"{how}, twice {again}: another process would end there too.", code, facts, ranks)
        if facts.no_replacement:
            return self._fail(f"{how}, and it cannot be replaced: {facts.no_replacement}", GAVE_UP, facts, ranks)
        if self.restarts_left <= 0:
            used = f"{self.restarts} of max_restarts={self.options.max_restarts} are used"
            return self._fail(f"{how}, and no replacement is left: {used}.", GAVE_UP, facts, ranks)
        return ()

    def signalled(self, received: signal.Signals, now: float, facts: Facts) -> Actions:
        """Decide what to do on a signal that ends a run. If an earlier one led to `State.STOPPING`, kill ranks at once.

        The same signal within a second is another copy of the first one: ``timeout`` sends SIGTERM to a process and to
        its group. SIGHUP comes with others and with copies of itself: a terminal that closes sends it, and its shell
        sends it again; a service manager may send it right after SIGTERM. Copies ask for nothing more.
        """
        if self._signal is None and self.options.gasp and facts.in_fit:
            self.state, self._signal, self._signalled_at = State.STOPPING, received, now
            return (
                Say(f"{received.name}: all ranks save and end, within {self.options.grace_s:g} s."),
                Send(signal.SIGTERM),
            )
        again = self._signal is not None
        soon = now - self._signalled_at < COPY_S
        if again and (received == signal.SIGHUP or (soon and self._signal in (received, signal.SIGHUP))):
            return ()
        forward = signal.SIGTERM if received == signal.SIGHUP else received  # ranks ignore SIGHUP
        actions = self._fail(
            f"The run was stopped by {received.name}.", 128 + received, facts, forward=forward, asked=True
        )
        if again:
            self.state, self.code, self._saves = State.KILLED, 128 + received, False
            actions += (EndRanks(signal.SIGKILL),)
        return actions

    def time_passes(self, now: float, facts: Facts, hanging: bool) -> Actions:
        """Decide what to do as the grace after a signal runs out.

        In the first half of the grace, ranks come to the end of a step. The rest is for writing the last checkpoint.

        Args:
            now: The time.
            facts: The situation now.
            hanging: Whether a rank was killed because it hung, and its end has not been noticed yet.
        """
        if self._signal is None:
            return ()
        passed_s, grace_s = now - self._signalled_at, self.options.grace_s
        if passed_s > grace_s:
            self._signalled_at = math.inf  # so that this happens only once
            self.state, self.code, self._saves = State.KILLED, self.code or 128 + self._signal, facts.in_fit
            return (
                Say(f"{grace_s:g} s are over (grace_s); processes that have not ended are killed."),
                EndRanks(signal.SIGKILL),
            )
        if passed_s > grace_s / 2 and not facts.given_up:
            return self._fail(f"The run was stopped by {self._signal.name}.", 128 + self._signal, facts, asked=True)
        if passed_s > grace_s * 2 / 3 and not hanging:
            return (EndAbsent(),)
        return ()

    def final_code(self, saved: bool) -> int:
        """Return the exit code of the run, before the run is counted among those that failed.

        Args:
            saved: Whether the last checkpoint is published.
        """
        return GASP_WRITTEN if saved else NOTHING_SAVED if self._saves else self.code

    def _fail(
        self,
        why: str,
        code: int,
        facts: Facts,
        ranks: tuple[int, ...] = (),
        forward: signal.Signals | None = None,
        asked: bool = False,
    ) -> Actions:
        """Give up the run: tell ranks why, and give them some time to end by themselves, or to save."""
        said: Actions = ()
        if not self.code:
            self.code, self._saves = code, self.options.gasp and facts.in_fit
            said = self._reason(why, facts)
        actions = (*said, GiveUp(why, ranks, asked or self._signal is not None, self.code))
        if self._saves:
            self.state = State.SAVING
            return actions
        self.state = State.ENDING
        send = () if forward is None else (Send(forward),)
        after_s = END_EARLY_S if facts.phase == "set-up" else END_S
        return (*actions, *send, EndRanks(signal.SIGTERM, after_s))

    def _reason(self, why: str, facts: Facts) -> Actions:
        if not facts.given_up:
            return (Say(why),)
        # A rank that gives up the run says so itself. What ended on another node, only the supervisor there has said.
        return (Say(f"The run has ended because of another node. {facts.given_up}"),) if facts.code else ()
