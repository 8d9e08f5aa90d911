"""This machine's processes: starts ranks and standbys, waits for them and watches them. It decides nothing."""

import os
import queue
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol, TypeAlias

from lightning_replica.control import planned_save
from lightning_replica.control.phase import Phase
from lightning_replica.core.descriptors import raise_limit
from lightning_replica.core.messages import warn
from lightning_replica.core.options import RecoveryOptions
from lightning_replica.core.orphans import born_mortal
from lightning_replica.launch import crashes
from lightning_replica.launch.beacons import HangLimits
from lightning_replica.launch.environment import RankEnvironment
from lightning_replica.launch.node_context import NodeContext
from lightning_replica.launch.policy import END_S
from lightning_replica.launch.rank_logs import STREAMS, RankLogs
from lightning_replica.launch.repeats import Repeats
from lightning_replica.launch.spool import Spool
from lightning_replica.launch.standby import Standbys
from lightning_replica.launch.watch import Hang, Watch
from lightning_replica.stores.interface import Store

_POLL_S = 0.01


class Process(Protocol):
    """A rank's process, with the interface of `subprocess.Popen`."""

    @property
    def pid(self) -> int:
        """The process id."""

    @property
    def returncode(self) -> int | None:
        """The exit code, -n for signal n; None until `wait` or `poll` has seen the end."""

    def wait(self) -> object:
        """Block until the process ends."""

    def poll(self) -> int | None:
        """Return the exit code; None while the process runs."""

    def send_signal(self, signum: int) -> None:
        """Send a signal, unless the process has ended."""


Start: TypeAlias = Callable[[int, dict[str, str]], Process]
"""Starts the process of a rank with an environment."""


def start_script(command: Callable[[int], tuple[Sequence[str], str | None]]) -> Start:
    """Return a function that starts ranks as re-runs of a script.

    Args:
        command: Returns the command line and the working directory of a rank.
    """

    def start(rank: int, environment: dict[str, str]) -> Process:
        line, cwd = command(rank)
        with ExitStack() as files:
            out, err = (
                files.enter_context(open(environment[variable], "ab")) if variable in environment else None
                for _, variable in STREAMS.values()
            )
            return subprocess.Popen(line, env=environment, cwd=cwd, preexec_fn=born_mortal(), stdout=out, stderr=err)

    return start


@dataclass(frozen=True)
class Child:
    """A process that is a rank.

    Attributes:
        rank: Its rank.
        process: The process.
        generation: The generation in which it was started.
    """

    rank: int
    process: Process
    generation: int


@dataclass(frozen=True)
class Ended:
    """The end of a rank's process.

    Attributes:
        child: The process.
        code: Its exit code, -n for signal n.
        hung: Why it was killed, if it was killed because it hung; else empty.
        again: Whether the process before it ended in the same way at the same place.
        where: Where the rank was, in words.
        crash: At which line a signal from inside has ended it, in words; else empty.
    """

    child: Child
    code: int
    hung: str
    again: bool
    where: str
    crash: str = ""


Event: TypeAlias = Child | Standbys | signal.Signals | Callable[[], None] | None
"""A rank's process that has ended; standbys to be filled; a signal; something to call; None to look at the ranks."""


class Node:
    """The processes of one machine. Only the supervisor's main thread calls methods other than `put`.

    Args:
        start: Starts the process of a rank.
        world_size: Number of ranks.
        options: What the user has chosen about recovery, as far as known at the start.
        directory: Where the stacks of ranks are written when one hangs.
        standbys: Processes that wait to become ranks; None if there are none.
        logs: Files for the ranks' output; None if it goes where this process's goes.

    Attributes:
        has_had_ranks: Whether a process of this machine has been a rank.
    """

    def __init__(
        self,
        start: Start,
        world_size: int,
        options: RecoveryOptions,
        directory: Path,
        standbys: Standbys | None,
        logs: RankLogs | None = None,
    ) -> None:
        self._start, self._standbys, self._logs = start, standbys, logs
        self._events: queue.SimpleQueue[Event] = queue.SimpleQueue()
        self._children: dict[int, Child] = {}
        self._watch = Watch(world_size, HangLimits.of(options), directory)
        self._hung: dict[int, str] = {}
        self._stop_requests = 0  # how many signals have asked for the end
        self._repeats = Repeats()
        self.has_had_ranks = False
        self._over = threading.Event()

    def open(self, context: NodeContext, connect: Callable[[], Store]) -> None:
        """Prepare to start ranks, and begin to watch them.

        Args:
            context: Where this machine stands.
            connect: Opens a new connection to the store of the run.
        """
        self._context, self._connect, self._spool = context, connect, Spool()
        raise_limit()
        self._watch.stands(context.on_node)
        threading.Thread(target=self._tick, name="watch", daemon=True).start()

    def watch_standbys(self) -> None:
        """Start to listen for calls of ranks, which say when it is time to start standbys."""
        if self._standbys is not None:
            self._standbys.watch(self._connect, self._events.put)

    def close(self) -> None:
        """Kill all remaining processes, and remove what ranks have left for each other."""
        self._over.set()
        self.end(signal.SIGKILL)
        if self._standbys is not None:
            self._standbys.end()
        self._spool.close()
        if self._logs is not None:
            self._logs.close()

    def use(self, options: RecoveryOptions, directory: Path) -> None:
        """Use other options from now on."""
        self._watch.use(HangLimits.of(options), directory)
        if self._standbys is not None:
            self._standbys.keep(options.standby)

    def put(self, event: Event) -> None:
        """Make `next` return an event. Any thread or signal handler may call this."""
        self._stop_requests += isinstance(event, signal.Signals) and event != planned_save.SIGNAL
        self._events.put(event)

    def next(self) -> Event:
        """Wait for the next event, and return it."""
        return self._events.get()

    @property
    def children(self) -> Mapping[int, Child]:
        """The processes that are ranks now, including those whose end has not been handled yet."""
        return self._children

    @property
    def hanging(self) -> bool:
        """Whether a rank was killed because it hung, and its end has not been handled yet."""
        return bool(self._hung)

    def killed(self) -> list[Child]:
        """Return the processes that `hanging` is about, as far as they end within `END_S`."""
        children = [self._children[rank] for rank in self._hung]
        deadline = time.monotonic() + END_S
        while any(child.process.poll() is None for child in children) and time.monotonic() < deadline:
            time.sleep(_POLL_S)
        return [child for child in children if child.process.poll() is not None]

    def start(self, rank: int, generation: int) -> str:
        """Start a new process for a rank, or use a standby; return which of the two, in words."""
        context = self._context
        environment = RankEnvironment(
            context.store, os.getpid(), generation, self._spool.path, context.node_store, doubles_up=context.doubles_up
        )
        variables = environment.variables(rank, context, os.environ) | self._watch.variables
        if self._logs is not None:
            variables |= self._log_files(self._logs, rank, generation)
        self._watch.started(rank, replaces=generation > 0)
        standby = self._standbys.take(rank, variables) if self._standbys is not None and generation else None
        child = Child(rank, standby or self._start(rank, variables), generation)
        self._children[rank], self.has_had_ranks = child, True
        # One thread per child blocks in waitpid, so that a death is noticed at once, on any platform.
        threading.Thread(target=self._wait, args=(child,), name=f"rank-{rank}", daemon=True).start()
        return "a new process" if standby is None else "a standby"

    def _log_files(self, logs: RankLogs, rank: int, generation: int) -> dict[str, str]:
        local_rank = self._context.local_rank(rank)
        try:
            return logs.open(rank, local_rank, generation, str(rank if self._context.doubles_up else local_rank))
        except OSError as error:
            if not generation:
                raise
            warn(f"the output of rank {rank} goes to no file: {error}.")  # it must take its place nevertheless
            return {}

    def bury(self, child: Child) -> Ended:
        """Handle the end of a rank's process, and return what is known of it."""
        del self._children[child.rank]
        code, slot = child.process.returncode or 0, self._watch.slot(child.rank)
        hung = self._hung.pop(child.rank, "")
        again, where = self._repeats.again(child.rank, code, slot), self._watch.where(child.rank)
        thread = 0 if slot is None else slot.thread
        crash = crashes.describe(code, crashes.read(self._spool.path, child.process.pid, thread)) if code < 0 else ""
        return Ended(child, code, hung, again, where, crash)

    def look(self, phase: Callable[[], Phase]) -> Hang | None:
        """Return which ranks hang, if any do. While a killed rank has not ended, no other rank is judged."""
        if self._hung:
            return None  # ranks that wait for the killed rank would seem to hang
        processes = {child.rank: child.process for child in self._children.values()}
        return self._watch.look(processes, phase, self._context.is_alone)

    @property
    def stalls(self) -> bool:
        """Whether all ranks of this node wait for others for too long, as last seen."""
        return self._watch.stalls and not self._hung

    def called_back(self) -> str:
        """Note that all ranks of the run were called back from their waits, and return what was seen here, in words."""
        return self._watch.called_back({child.rank: child.process for child in self._children.values()})

    def kill(self, rank: int, why: str) -> None:
        """Kill a rank that hangs. Its end is an event like that of any other rank."""
        self._hung[rank] = why
        self._children[rank].process.send_signal(signal.SIGKILL)

    def dismiss(self, ranks: Iterable[int]) -> None:
        """Kill ranks that will run elsewhere, and wait until they have ended. Their ends are no events."""
        gone = [self._children.pop(rank) for rank in ranks if rank in self._children]
        for child in gone:
            child.process.send_signal(signal.SIGKILL)
        for child in gone:
            child.process.wait()
            self._hung.pop(child.rank, None)

    def has(self, child: Child) -> bool:
        """Return whether a process is still a rank of this node."""
        return self._children.get(child.rank) is child

    def kill_all(self) -> None:
        """Kill all ranks. Unlike other methods, any thread may call this."""
        for child in tuple(self._children.values()):
            child.process.send_signal(signal.SIGKILL)

    def send(self, signum: int, ranks: Iterable[int] | None = None) -> None:
        """Send a signal to ``ranks``, by default to all ranks."""
        for rank in self._children if ranks is None else ranks:
            self._children[rank].process.send_signal(signum)

    def end(self, signum: signal.Signals, after_s: float = 0.0) -> None:
        """End all ranks. Those that still run after ``after_s`` get ``signum``, then SIGKILL.

        Whoever is told to end once more meanwhile, as by another Ctrl-C, waits no longer.
        """
        deadline, requests = time.monotonic() + after_s, self._stop_requests
        for last in (signum, signal.SIGKILL):
            while any(child.process.poll() is None for child in self._children.values()):
                if self._stop_requests != requests:
                    self.send(signal.SIGKILL)
                    break
                if time.monotonic() > deadline:
                    self.send(last)
                    deadline = time.monotonic() + END_S
                    break
                time.sleep(_POLL_S)
        for child in self._children.values():
            child.process.wait()

    def _wait(self, child: Child) -> None:
        child.process.wait()
        self._events.put(child)

    def _tick(self) -> None:
        # Not a time-out of the queue: in Python 3.11 that never expires once a signal handler has run longer than it.
        while not self._over.wait(self._watch.interval_s):
            self._events.put(None)
