"""What a rank does first: it makes sure that the supervisor sees it, and that its errors are reported."""

import contextlib
import os
import signal
import sys
import threading
from types import TracebackType
from typing import cast

import torch.distributed as dist

from lightning_replica.control.generation import Generations
from lightning_replica.control.phase import phase_of
from lightning_replica.core import entry
from lightning_replica.core.orphans import die_with
from lightning_replica.launch import crashes, stacks
from lightning_replica.launch.beacons import VARIABLE, register_stacks
from lightning_replica.launch.environment import RankEnvironment, rank_here
from lightning_replica.launch.exit_report import ExitReport, show


class SupervisedRank:
    """This process as a rank that a supervisor has started.

    Args:
        environment: What the supervisor has passed to it.

    Attributes:
        rank: Its rank.
        replaces: Whether it was started to replace a process that was lost.
    """

    def __init__(self, environment: RankEnvironment) -> None:
        self._environment = environment
        self.rank = rank_here()
        self.replaces = environment.generation > 0
        self._shown: BaseException | None = None
        if environment.spool is not None:
            crashes.write_down(environment.spool, os.getpid())
        _ignore_hangup()
        if VARIABLE in os.environ:
            with contextlib.suppress(OSError):  # `Beacon` reports it
                register_stacks(os.environ[VARIABLE], self.rank, stacks.answer())
        self._print = sys.excepthook
        sys.excepthook = self._hook

    def connect(self) -> dist.Store:
        """Open a new connection to the supervisor's store."""
        return self._environment.connect()

    def show(self, error: BaseException) -> None:
        """Print an error's traceback, unless it has been printed already."""
        if error is not self._shown:
            self._shown = error
            show(error, self.rank, self._environment.connect())

    def ends(self, error: BaseException) -> None:
        """Write to the store which error this process ends with."""
        ExitReport.of(self.rank, error).leave(self._environment.connect(), self._environment.generation)

    def leaves(self, error: SystemExit) -> None:
        """End the run if this process ends in training by itself, and without a fault: the script wants it to."""
        store = self._environment.connect()
        generations = Generations(store, self._environment.generation)
        if phase_of(store) != "fit" or generations.verdict() is not None:
            return
        place = ExitReport.of(self.rank, error).place
        generations.end(f"Rank {self.rank} has called `sys.exit()` in training ({place}).")

    def _hook(self, kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        try:
            report = ExitReport.of(self.rank, error)
            report.leave(self._environment.connect(), self._environment.generation)
            if report.own and not isinstance(error, KeyboardInterrupt):
                self.show(error)
        except (OSError, dist.DistError):  # the supervisor is gone, so nobody else reports the error
            self._print(kind, error, trace)


def _ignore_hangup() -> None:
    """Ignore SIGHUP, which a terminal that closes sends to all ranks. The supervisor hears it, and has them save."""
    is_main = threading.current_thread() is threading.main_thread()
    if is_main and signal.getsignal(signal.SIGHUP) is signal.SIG_DFL:
        signal.signal(signal.SIGHUP, signal.SIG_IGN)


def enter() -> SupervisedRank | None:
    """Make this process the rank that its environment names. Return None if it is no rank, or a child of one."""
    environment = RankEnvironment.current()
    if environment is None or os.getppid() != environment.supervisor:
        return None
    if entry.entered() is None:
        die_with(environment.supervisor)
        entry.enter(SupervisedRank(environment))
    return cast("SupervisedRank", entry.entered())
