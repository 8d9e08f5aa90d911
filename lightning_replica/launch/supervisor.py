"""The process that starts the ranks, sees them die and replaces them. It never trains."""

import logging
import math
import os
import queue
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Final, Protocol

from lightning_replica import planned_save
from lightning_replica.exit_codes import DEVICE_LOST, GASP_WRITTEN, GAVE_UP, NOTHING_SAVED
from lightning_replica.launch.beacons import HangLimits
from lightning_replica.launch.ending import Ending
from lightning_replica.launch.environment import LOOPBACK, RankEnvironment, serve
from lightning_replica.launch.last_words import LastWords
from lightning_replica.launch.orphans import born_mortal
from lightning_replica.launch.repeats import Repeats
from lightning_replica.launch.spool import Spool
from lightning_replica.launch.standby import Standbys
from lightning_replica.launch.told import Told
from lightning_replica.launch.watch import Phase, Watch
from lightning_replica.messages import leave_room
from lightning_replica.recovery.faults import Fault
from lightning_replica.recovery.gasp import Gasp
from lightning_replica.recovery.generation import Generations, Store
from lightning_replica.recovery.options import RecoveryOptions

log = logging.getLogger(__name__)

_END_S: Final = 10.0  # between being told to end and being killed
_END_EARLY_S: Final = 2.0  # the same before the first batch, where nothing is lost
PHASE = "phase"  # store key: "fit" between `armed` and `finished`, when a death can be recovered from
NO_REPLACEMENT = "no_replacement"  # store key: why a rank that is lost now cannot be replaced


class Process(Protocol):
    """A rank's process, as `subprocess.Popen` has it."""

    @property
    def pid(self) -> int:
        """Its process id."""

    @property
    def returncode(self) -> int | None:
        """Exit code, -n for signal n; None until `wait` or `poll` has seen the end."""

    def wait(self) -> object:
        """Blocks until the process ends."""

    def poll(self) -> int | None:
        """The exit code, None while the process runs."""

    def send_signal(self, signum: int) -> None:
        """Sends a signal, unless the process has ended."""


_HEARD: Final = (signal.SIGINT, signal.SIGTERM, planned_save.SIGNAL)
Start = Callable[[int, dict[str, str]], Process]
"""Starts the process of a rank with an environment."""


def start_script(command: Callable[[int], tuple[Sequence[str], str | None]]) -> Start:
    """Starts ranks as re-runs of a script: ``command`` gives the command line and working directory of a rank."""

    def start(rank: int, environment: dict[str, str]) -> Process:
        line, cwd = command(rank)
        return subprocess.Popen(line, env=environment, cwd=cwd, preexec_fn=born_mortal())

    return start


@dataclass
class _Child:
    rank: int
    process: Process
    generation: int


class Supervisor:
    """Runs N ranks as children and ends when they end.

    Args:
        start: Starts a rank.
        world_size: Number of ranks.
        options: What the user has chosen about recovery, as far as it is known.
        say: Tells the user something.
        directory: Where the stacks of ranks are written to when one hangs.
        standbys: Processes that wait to become ranks.
        asks: Whether ranks know more of options and directory (`Told`).
        notes: What ranks find in the store.
    """

    def __init__(
        self,
        start: Start,
        world_size: int,
        options: RecoveryOptions,
        say: Callable[[str], None],
        directory: Path = Path(),
        standbys: Standbys | None = None,
        asks: bool = False,
        notes: Mapping[str, str] | None = None,
    ) -> None:
        self._start_process, self._world_size, self._options, self._say = start, world_size, options, say
        self._standbys, self._asks, self._notes = standbys, asks, notes or {}
        self._ended: queue.SimpleQueue[_Child | signal.Signals | Standbys | None] = queue.SimpleQueue()
        self._children: dict[int, _Child] = {}
        self._watch = Watch(world_size, HangLimits.of(options), directory)
        self._hung: dict[int, str] = {}
        self._repeats = Repeats()
        self._over = threading.Event()
        self._restarts = 0
        self._code = 0
        self._told: signal.Signals | None = None  # the first signal that this process was sent
        self._told_at = 0.0
        self._gasps = False  # those who are left are writing, or try to

    def run(self) -> int:
        """Starts all ranks and returns the exit code that this process should end with.

        0 if every rank ended with 0, one of `exit_codes`, or the code of the rank that failed first (128 + n for
        signal n).
        """
        self._store = serve(LOOPBACK)
        self._spool = Spool()
        self._generations = Generations(self._store)
        for key, note in self._notes.items():
            self._store.set(key, note)
        self._handlers = {s: signal.signal(s, self._on_signal) for s in _HEARD}
        self._hear_usr1()
        asked = ExitStack()
        asked.enter_context(planned_save.listening())
        threading.Thread(target=self._tick, name="watch", daemon=True).start()
        try:
            for rank in range(self._world_size):
                self._start(rank, generation=0)
            if self._standbys is not None:
                self._standbys.watch(self._store.port, self._ended.put)
            while self._children:
                event = self._ended.get()
                if event is None:
                    self._look()
                else:
                    self._on_end(event)
        finally:
            self._over.set()
            self._terminate(signal.SIGKILL)
            if self._standbys is not None:
                self._standbys.end()
            asked.close()
            self._spool.close()
            for signum, handler in self._handlers.items():
                signal.signal(signum, handler)
        return self._final_code()

    def _ask(self) -> None:
        """Learns what the trainer's callbacks say, once a rank has told it."""
        told = Told.ask(self._store) if self._asks else None
        if told is None:
            return
        self._asks, self._options = False, told.options
        self._watch.use(HangLimits.of(told.options), Path(told.directory))
        self._hear_usr1()
        leave_room(told.room)
        if self._standbys is not None:
            self._standbys.keep(told.options.standby)

    def _hear_usr1(self) -> None:
        """With a last checkpoint to write, it means the same as SIGTERM; else what it means everywhere."""
        if self._options.gasp and signal.SIGUSR1 not in self._handlers:
            self._handlers[signal.SIGUSR1] = signal.signal(signal.SIGUSR1, self._on_signal)

    def _final_code(self) -> int:
        path = Gasp.written(self._generations) if self._options.gasp else None
        code = GASP_WRITTEN if path is not None else NOTHING_SAVED if self._gasps else self._code
        code = Ending(self._store, self._world_size).judge(code, self._in_fit(), self._say)
        if path is not None:
            again = " Start it again from there." if code == GASP_WRITTEN else ""
            self._say(f"the run has ended before its time, and has left {path}.{again}")
        return code

    def _start(self, rank: int, generation: int) -> str:
        """Starts a rank's process, or finds it; says which."""
        environment = RankEnvironment(LOOPBACK, self._store.port, os.getpid(), generation, self._spool.path)
        variables = environment.variables(rank, self._world_size, os.environ) | self._watch.variables
        self._watch.born(rank, replaces=generation > 0)
        standby = self._standbys.take(rank, variables) if self._standbys is not None and generation else None
        child = _Child(rank, standby or self._start_process(rank, variables), generation)
        self._children[rank] = child
        # One thread a child, blocked in waitpid: a death is known at once, on any platform.
        threading.Thread(target=self._wait, args=(child,), name=f"rank-{rank}", daemon=True).start()
        return "a new process" if standby is None else "a standby"

    def _wait(self, child: _Child) -> None:
        child.process.wait()
        self._ended.put(child)

    def _tick(self) -> None:
        # Not a time-out of the queue's: in Python 3.11 it never ends once a signal handler has outlasted it.
        while not self._over.wait(self._watch.interval_s):
            self._ended.put(None)

    def _on_signal(self, signum: int, _: object) -> None:
        self._ended.put(signal.Signals(signum))

    def _on_end(self, event: "_Child | signal.Signals | Standbys") -> None:
        self._ask()
        if isinstance(event, Standbys):
            event.fill(self._options.max_restarts - self._restarts)
            return
        if event == planned_save.SIGNAL:
            self._on_asked_to_save()
            return
        if isinstance(event, signal.Signals):
            self._on_told(event)
            return
        self._on_child_end(event)

    def _on_child_end(self, event: _Child) -> None:
        del self._children[event.rank]
        code = event.process.returncode or 0
        in_fit = self._in_fit()
        if code == 0 and not in_fit:
            return
        hung = self._hung.pop(event.rank, None)
        how = hung or self._why(event, code)
        code = GAVE_UP if hung and not in_fit else 128 - code if code < 0 else code or 1
        if self._code or self._generations.verdict() is not None:
            self._fail(how, code, (event.rank,) if self._options.gasp else ())
        elif not self._options.recovery:
            self._fail(f"{how}. With recovery=False the run ends with it.", code)
        elif not in_fit:
            where = "before its first batch" if self._phase() == "set-up" else "outside of training"
            self._fail(f"{how} {where}, where a rank cannot be replaced.", code)
        elif self._repeats.again(event.rank, event.process.returncode or 0, self._watch.slot(event.rank)):
            where = self._watch.where(event.rank)
            self._fail(f"{how}, twice {where}: another process would end there too.", code, (event.rank,))
        elif self._store.check([NO_REPLACEMENT]):
            why = self._store.get(NO_REPLACEMENT).decode()
            self._fail(f"{how}, and no replacement could find its way here: {why}", GAVE_UP, (event.rank,))
        elif self._restarts >= self._options.max_restarts:
            used = f"{self._restarts} of max_restarts={self._options.max_restarts} are used"
            self._fail(f"{how}, and no replacement can be had: {used}.", GAVE_UP, (event.rank,))
        else:
            self._replace(event.rank, Fault("hang" if hung else "death", (event.rank,), how))

    def _on_asked_to_save(self) -> None:
        """Passes it on to whoever listens: one rank that hears it is enough."""
        listening = [child for child in self._children.values() if self._listens(child)] if self._in_fit() else []
        for child in listening:
            child.process.send_signal(planned_save.SIGNAL)
        if not listening:
            self._say(
                f"{planned_save.SIGNAL.name}: nothing is saved, as training is not under way, or has neither a"
                " CheckpointPublisher nor a DyingGaspCheckpoint to say where."
            )

    def _listens(self, child: _Child) -> bool:
        """Whether this very process does, and not the one before it that had its rank."""
        key = planned_save.LISTENS.format(child.rank)
        return self._store.check([key]) and int(self._store.get(key)) == child.generation

    def _on_told(self, told: signal.Signals) -> None:
        """A signal to this process: ranks agree to save and end. After a second one they end at once."""
        if self._told is None and self._options.gasp and self._in_fit():
            self._told, self._told_at = told, time.monotonic()
            self._say(f"{told.name}: all ranks save and end, within {self._options.grace_s:g} s.")
            for child in self._children.values():
                child.process.send_signal(signal.SIGTERM)
            return
        again = self._told is not None
        self._fail(f"The run was stopped by {told.name}.", 128 + told, forward=told, asked=True)
        if again:
            self._code, self._gasps = 128 + told, False
            self._terminate(signal.SIGKILL)

    def _keep_time(self) -> None:
        """Half of the grace is for coming to a step's end; then those who write get what is left."""
        if self._told is None:
            return
        passed_s = time.monotonic() - self._told_at
        if passed_s > self._options.grace_s:
            self._say(f"{self._options.grace_s:g} s are over (grace_s); what has not ended is killed.")
            self._told_at = math.inf  # said and done once
            self._code, self._gasps = self._code or 128 + self._told, self._in_fit()
            self._terminate(signal.SIGKILL)
        elif passed_s > self._options.grace_s / 2 and self._generations.verdict() is None:
            self._fail(f"The run was stopped by {self._told.name}.", 128 + self._told, asked=True)
        elif passed_s > self._options.grace_s * 2 / 3 and not self._hung:
            self._end_absent()

    def _end_absent(self) -> None:
        """Kills whom the others wait for before they can write: those may hold all that is needed."""
        absent = [rank for rank in self._children if not Gasp.has_come(self._generations, rank)]
        for rank in absent if len(absent) < len(self._children) else ():
            self._hung[rank] = f"Rank {rank} was busy and did not come to save; it was killed, and the others go on."
            self._say(self._hung[rank])
            self._children[rank].process.send_signal(signal.SIGKILL)

    def _why(self, ended: _Child, code: int) -> str:
        """How a rank has ended, or whichever other made it end: it need not be the first that is seen to."""
        others = () if self._in_fit() else self._children.values()  # in `fit` each fault stands for itself
        processes = [(child.rank, child.generation) for child in (ended, *others)]
        words = LastWords.heard(self._store, processes) if code > 0 and code != DEVICE_LOST else []
        if words and (words[0].own or words[0].rank == ended.rank):
            where = f" ({words[0].place})" if words[0].place else ""
            return f"Rank {words[0].rank} ended with {words[0].error}{where}"
        return f"Rank {ended.rank} {_how(code)}"

    def _phase(self) -> Phase:
        phase = self._store.get(PHASE) if self._store.check([PHASE]) else b""
        return "fit" if phase == b"fit" else "done" if phase else "set-up"

    def _in_fit(self) -> bool:
        return in_fit(self._store)

    def _look(self) -> None:
        """Kills whoever hangs; that it has died is noticed in the usual way."""
        self._ask()
        self._keep_time()
        if self._hung:
            return  # killed, its end not yet seen: whoever waits for it would seem to wait in vain
        processes = {child.rank: child.process for child in self._children.values()}
        hang = self._watch.look(processes, self._phase)
        over = self._code or self._generations.verdict() is not None
        if hang is None or (over and not self._gasps):
            return
        self._say(hang.text)
        if hang.stalled:
            self._generations.begin_next(0, Fault("hang", (), hang.text))
        for rank, how in hang.culprits.items():
            self._hung[rank] = how
            self._children[rank].process.send_signal(signal.SIGKILL)

    def _replace(self, rank: int, fault: Fault) -> None:
        self._restarts += 1
        who = self._start(rank, self._generations.begin_next(0, fault))
        self._say(f"{fault.text}; {who} takes its place ({self._restarts} of {self._options.max_restarts}).")

    def _fail(
        self,
        why: str,
        code: int,
        ranks: tuple[int, ...] = (),
        forward: signal.Signals | None = None,
        asked: bool = False,
    ) -> None:
        """Ends the run: ranks are told why and given some time to end by themselves, or to save what they have."""
        if not self._code:
            self._code = code
            self._gasps = self._options.gasp and self._in_fit()
            if self._generations.verdict() is None:
                self._say(why)
        self._generations.give_up(why, asked or self._told is not None)
        self._generations.begin_next(0, Fault("end", ranks, why))  # wakes whoever is blocked
        if self._gasps:
            return
        if forward is not None:
            for child in self._children.values():
                child.process.send_signal(forward)
        self._terminate(signal.SIGTERM, after_s=_END_EARLY_S if self._phase() == "set-up" else _END_S)

    def _terminate(self, signum: signal.Signals, after_s: float = 0.0) -> None:
        """Ends all children; those that are still there after ``after_s`` are sent ``signum``, then SIGKILL."""
        deadline = time.monotonic() + after_s
        for last in (signum, signal.SIGKILL):
            while any(child.process.poll() is None for child in self._children.values()):
                if time.monotonic() > deadline:
                    for child in self._children.values():
                        child.process.send_signal(last)
                    deadline = time.monotonic() + _END_S
                    break
                time.sleep(0.01)
        for child in self._children.values():
            child.process.wait()


def in_fit(store: Store) -> bool:
    """Whether a lost rank can be replaced now."""
    return store.check([PHASE]) and store.get(PHASE) == b"fit"


def _how(code: int) -> str:
    if code < 0:
        return f"died ({signal.Signals(-code).name})"
    return f"ended with exit code {code}" + (", without its device" if code == DEVICE_LOST else "")
