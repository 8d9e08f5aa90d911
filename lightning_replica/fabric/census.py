"""Who is still there when a collective fails, and what to tell the user.

Every rank whose collective fails leaves its number in the store, and closes its connections, so that ranks that wait in
other collectives fail as well and do the same. Ranks whose numbers do not come are those that the run has lost. Where
they ran on this machine, they are known to be gone at once: the launcher may soon end all others.
"""

import os
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch.distributed as dist

from lightning_replica._compat.groups import default_store
from lightning_replica._compat.torch import registered_groups
from lightning_replica.core.machine import has_ended, machine
from lightning_replica.devices import gloo
from lightning_replica.devices.exceptions import first_line, is_of_others
from lightning_replica.errors import CheckpointError, ConfigurationError, RecoveryError

PATIENCE_S = 3.0
_HERE, _PROCESS = "replica_zero/here", "replica_zero/process"
_POLL_S = 0.02
_ADVICE = (
    "Fabric leaves the loop to you, so `replica_zero` can neither undo a step nor put a process into the middle of one:"
    " this run is over. To be recoverable, a loop must save (`fabric.save`) every few steps, with the number of the"
    " step; begin with the newest checkpoint, if there is one (`fabric.load`); and be started by what starts all ranks"
    " again, such as `torchrun --max-restarts=3`. docs/fabric.md shows one. `lightning.Trainer` has a loop that loses"
    " no step."
)


@dataclass(frozen=True)
class Absent:
    """Ranks that do not answer.

    Attributes:
        gone: Those whose process has ended, as seen on this machine.
        silent: The others.
    """

    gone: Sequence[int]
    silent: Sequence[int]

    def __str__(self) -> str:
        if not self.gone and not self.silent:
            return "All ranks answer, so none is lost: they may have called different collectives."
        said = [f"{_ranks(self.gone)} gone: the process has ended."] if self.gone else []
        if self.silent:
            said.append(f"{_ranks(self.silent)} silent for {PATIENCE_S:g} s: lost, ended by an error, or busy.")
        return " ".join(said)


def register_process() -> None:
    """Tell the other ranks which process this is. Called once the default group is open."""
    default_store().set(f"{_PROCESS}/{dist.get_rank()}", f"{machine()} {os.getpid()}")


@contextmanager
def answering(doing: str) -> Iterator[None]:
    """Turn the failure of a collective into an error that names lost ranks, and says what a loop must do.

    Args:
        doing: What the block does, as the beginning of a sentence.

    Raises:
        RecoveryError: In place of an error of torch.distributed.
    """
    try:
        yield
    except (CheckpointError, ConfigurationError, RecoveryError):
        raise
    except Exception as error:
        if not is_of_others(error):
            raise
        raise RecoveryError(f"{doing} has failed ({first_line(error)}). {_who_is_lost()} {_ADVICE}") from error


def _who_is_lost() -> str:
    if not dist.is_initialized():
        return "The process group of the run is closed."
    try:
        return str(take_census())
    except (dist.DistError, RuntimeError):
        return f"Rank {dist.get_rank()} cannot reach the store: the process that serves it, mostly rank 0, is gone."


def take_census() -> Absent:
    """Answer, make all collectives of this process fail, and wait for the answers of the other ranks.

    Raises:
        DistError: If the store is gone. RuntimeError under some versions of torch.
    """
    store, own = default_store(), machine()
    store.set(f"{_HERE}/{dist.get_rank()}", "")
    for group in registered_groups(gloo.NAME):
        gloo.abort_group(group)
    deadline = time.monotonic() + PATIENCE_S
    missing = [rank for rank in range(dist.get_world_size()) if rank != dist.get_rank()]
    while True:
        missing = [rank for rank in missing if not store.check([f"{_HERE}/{rank}"])]
        gone = [rank for rank in missing if _is_gone(store, rank, own)]
        if gone == missing or time.monotonic() > deadline:
            return Absent(gone, [rank for rank in missing if rank not in gone])
        time.sleep(_POLL_S)


def _is_gone(store: dist.Store, rank: int, own: int) -> bool:
    key = f"{_PROCESS}/{rank}"
    where, pid = map(int, store.get(key).split()) if store.check([key]) else (None, 0)
    return where == own and has_ended(pid)


def _ranks(numbers: Sequence[int]) -> str:
    return f"Rank {numbers[0]} is" if len(numbers) == 1 else f"Ranks {', '.join(map(str, numbers))} are"
