"""The processes of a job that `lightning-replica chaos` has started, and the role of each.

They are found by a variable in their environment. All of them inherit it, even those whose parent has died.
"""

import os
import signal
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, TypeAlias

import psutil

from lightning_replica.chaos.experiment import VARIABLE

_KILLED_S = 10.0  # time in which a killed process is gone, unless the kernel cannot end it

Role: TypeAlias = Literal["rank", "worker", "standby", "supervisor"]
"""The role of a process. A worker is any process that a rank has started, mostly a DataLoader worker."""


@dataclass(frozen=True)
class Member:
    """A process of the job.

    Attributes:
        pid: Its process id.
        role: Its role.
        rank: Its rank, or that of the rank that it works for; None if there is no such rank.
    """

    pid: int
    role: Role
    rank: int | None


class Job:
    """The processes of one run.

    Args:
        experiment: The file of the experiment, which the run's environment names.

    Attributes:
        outlived: Ids of processes that still ran when they should have ended.
    """

    def __init__(self, experiment: Path) -> None:
        self._experiment = str(experiment)
        self.outlived: list[int] = []

    def members(self, ranks: Mapping[int, int]) -> list[Member]:
        """Return the processes that take part in the training, without shells and the like around them.

        Args:
            ranks: The rank of each process that is a rank, by process id.
        """
        parents = {process.pid: parent for process, parent in self._alive()}
        supervisors = {parents[pid] for pid in ranks if pid in parents} & set(parents)
        found = []
        for pid, parent in parents.items():
            if pid in ranks:
                found.append(Member(pid, "rank", ranks[pid]))
            elif pid in supervisors:
                found.append(Member(pid, "supervisor", None))
            elif parent in supervisors:
                found.append(Member(pid, "standby", None))
            else:
                above = _rank_above(pid, parents, ranks)
                found += [] if above is None else [Member(pid, "worker", above)]
        return found

    def send(self, member: Member, signum: signal.Signals) -> bool:
        """Send a signal, and return whether the process was still running and still part of the job."""
        with suppress(psutil.Error, ProcessLookupError):
            if self._is_ours(psutil.Process(member.pid)):
                os.kill(member.pid, signum)
                return True
        return False

    def end(self, wait_s: float) -> None:
        """Wait up to ``wait_s`` seconds until all processes have ended, and kill those that have not."""
        _, left = psutil.wait_procs([process for process, _ in self._alive()], wait_s)
        for process in left:
            with suppress(psutil.Error):
                process.kill()
        psutil.wait_procs(left, _KILLED_S)
        self.outlived += sorted(process.pid for process in left)

    def _alive(self) -> list[tuple[Any, int]]:
        """Return all processes of the job, each with the process id of its parent."""
        found = []
        for process in psutil.process_iter():
            with suppress(psutil.Error, OSError):
                if self._is_ours(process):
                    found.append((process, process.ppid()))
        return found

    def _is_ours(self, process: Any) -> bool:
        zombie = process.status() == psutil.STATUS_ZOMBIE
        return not zombie and process.environ().get(VARIABLE) == self._experiment


def _rank_above(pid: int, parents: Mapping[int, int], ranks: Mapping[int, int]) -> int | None:
    while pid in parents:
        pid = parents[pid]
        if pid in ranks:
            return ranks[pid]
    return None
