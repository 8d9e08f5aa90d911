"""The process groups of one generation: opened, aborted from another thread, closed."""

import ctypes
import sys
import threading
import traceback
from collections.abc import Callable, Iterable, Sequence
from datetime import timedelta
from typing import Any

import torch.distributed as dist

from lightning_replica._compat.torch import (
    backend_of,
    backend_on_host,
    forget_failed_opening,
    give_backend,
    keep_open,
    registered_groups,
    set_group_timeout,
)
from lightning_replica.devices.host import HOST
from lightning_replica.devices.interface import Device
from lightning_replica.errors import CollectiveError
from lightning_replica.recovery.patient_store import LonelyStore, PatientStore
from lightning_replica.works import all_ended

# An operation that an abort wakes ends within a few milliseconds.
_PATIENCE_S = 0.1

# How long ranks that are all there may take to connect. [Note: a cut connection] gloo connects in C++, where nothing
# can be aborted. Who loses its peer there (which went on to the next generation before it had answered) would wait
# for as long as collectives may take, and hold up the recovery that the peer waits for.
# tests/recovery/test_groups.py breaks without it.
_CONNECT_S = 10.0
_CONNECT_S_PER_RANK = 0.05  # a full mesh of a thousand

_STAND_IN = "stand_in"


class _StandIn(dist.ProcessGroup):
    """A group without connections; every collective fails at once."""

    def getBackendName(self) -> str:
        return _STAND_IN


def _stand_in(_: dist.Store, rank: int, size: int, __: timedelta) -> dist.ProcessGroup:
    return _StandIn(rank, size)  # type: ignore[call-arg]


class ProcessGroups:
    """Owns the default group and whatever was made inside it.

    Args:
        store: Where ranks find each other; every generation has a prefix of its own.
        rank: This rank.
        world_size: Number of ranks.
        device: This rank's; says which backend, and how its groups are aborted.
        timeout_s: After which a collective fails on its own.
        check: Raises when the world moves on; called while groups are opened.

    Attributes:
        device: This rank's.
    """

    def __init__(
        self,
        store: dist.Store,
        rank: int,
        world_size: int,
        device: Device,
        timeout_s: float,
        check: Callable[[], None] = lambda: None,
    ) -> None:
        self._store, self._rank, self._world_size = PatientStore(store, check, timeout_s), rank, world_size
        self.device, self._timeout = device, timedelta(seconds=timeout_s)
        self._on_host, self._apart = backend_on_host(device.backend)
        self._connect_timeout = timedelta(seconds=min(timeout_s, _CONNECT_S + _CONNECT_S_PER_RANK * world_size))
        self._groups: list[dist.ProcessGroup] = []
        self._excepthook = sys.excepthook
        self._lock = threading.Lock()

    def open(
        self, generation: int, make: Callable[[timedelta], Iterable[dist.ProcessGroup]], resume: bool = False
    ) -> None:
        """Opens the default group of ``generation``, then lets ``make`` make the others. Collective.

        All ranks must be about to call it: connecting has a time-out of its own, which ``make`` is given. What was
        open is closed, and the device, should it have been stopped, goes on.

        Args:
            generation: Names the groups.
            make: Makes the other groups, the same ones every time.
            resume: Whether the device's connections are taken over from the groups that were open.
        """
        try:
            kept = self._resumed() if resume else []
            self._open_default(f"groups/{generation}", self._rank, self._world_size, self._on_host if kept else None)
            for group in make(self._connect_timeout):
                self._own(group)
            # Those that `add` made come last, and have no successor.
            for group, backend in zip(self._groups, kept, strict=False):
                give_backend(group, self._apart, backend, self.device.backend)
        except RuntimeError as error:
            raise CollectiveError(f"Could not open the process groups of generation {generation}: {error}") from error

    def _resumed(self) -> list[Any]:
        """What carries the device's tensors in each group: it outlives them.

        Raises:
            CollectiveError: If it cannot; the next generation, which then begins, stops those who could.
        """
        if not self.device.resume_groups(self._groups):
            raise CollectiveError("the device's connections cannot go on")
        keep_open(self._groups)
        return [backend_of(group, self._apart) for group in self._groups]

    def open_among(self, generation: int, ranks: Sequence[int]) -> None:
        """Opens a default group of ``ranks`` only, in which they are numbered in that order. They all call it."""
        try:
            self._open_default(f"groups/among/{generation}", ranks.index(self._rank), len(ranks))
        except RuntimeError as error:
            raise CollectiveError(f"Could not open a process group of {ranks=}: {error}") from error

    def _open_default(self, prefix: str, rank: int, world_size: int, backend: str | None = None) -> None:
        self.device.restart()
        self._destroy()
        dist.init_process_group(
            backend or self.device.backend,
            store=dist.PrefixStore(prefix, self._store),
            rank=rank,
            world_size=world_size,
            timeout=self._connect_timeout,
        )
        self._own(dist.group.WORLD)

    def stand_in(self) -> None:
        """Opens a default group that knows rank and world size and nothing else.

        A replacement has it until it has joined the others: user code on the way there may ask who it is, and make
        groups of its own, which it makes anew with all others in the hook that is there for that.
        """
        if _STAND_IN not in dist.Backend.backend_list:
            dist.Backend.register_backend(_STAND_IN, _stand_in, devices=sorted({HOST.type, self.device.kind}))
        dist.init_process_group(_STAND_IN, store=LonelyStore(), rank=self._rank, world_size=self._world_size)

    def add(self, ranks: list[int]) -> dist.ProcessGroup:
        """Makes a group of some ranks; only they call it."""
        try:
            group: dist.ProcessGroup = dist.new_group(
                ranks, timeout=self._connect_timeout, use_local_synchronization=True
            )
        except RuntimeError as error:
            raise CollectiveError(f"Could not open a process group of {ranks=}: {error}") from error
        self._own(group)
        return group

    def remove(self, group: dist.ProcessGroup) -> None:
        """Destroys a group that `add` made."""
        with self._lock:
            self._groups.remove(group)
        dist.destroy_process_group(group)

    def abort(self) -> None:
        """Wakes this rank from any collective, on user code's own groups too. From any thread, any number of times."""
        with self._lock:
            others = [group for group in registered_groups(self.device.backend) if group not in self._groups]
            self.device.abort_groups((*self._groups, *others))

    def leave(self) -> None:
        """Aborts all groups; peers see their connections close. Those of a device are destroyed once that runs again.

        The abort closes them, so it does not matter that a traceback may still hold a group.
        """
        self.abort()
        if self.device.is_host:
            self._destroy()

    def close(self) -> None:
        """Aborts and destroys all groups."""
        self.abort()
        self._destroy()

    def _destroy(self) -> None:
        with self._lock:
            doomed, self._groups = self._groups, []
        if not all_ended(_PATIENCE_S):
            for group in doomed:
                _keep_forever(group)
        if dist.is_initialized():
            dist.destroy_process_group()
        forget_failed_opening()
        sys.excepthook = self._excepthook  # every init_process_group wraps the one before

    def _own(self, group: dist.ProcessGroup | None) -> None:
        if group is not None:
            if self._connect_timeout != self._timeout:
                set_group_timeout(group, self._timeout)
            with self._lock:
                self._groups.append(group)


def uses_closed_group(error: BaseException) -> bool:
    """Whether ``error`` was raised in a call with a process group that has been closed.

    What torch and gloo say then tells nobody what to do; so the groups are looked for where the error came from.
    """
    known = [id(group) for group in registered_groups()]
    frames = (frame for frame, _ in traceback.walk_tb(error.__traceback__))
    values = (frame.f_locals.get("group") for frame in frames)  # as every collective calls its argument
    return any(isinstance(value, dist.ProcessGroup) and id(value) not in known for value in values)


def _keep_forever(group: dist.ProcessGroup) -> None:
    """Makes sure that ``group`` is never destroyed, not even when the interpreter ends.

    Its idle threads stay, a dozen for each such fault. See [Note: destructors may block] in works.py.
    """
    ctypes.pythonapi.Py_IncRef(ctypes.py_object(group))
