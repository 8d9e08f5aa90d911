"""The process groups of one generation: opened, aborted from another thread, closed.

torch and user code hold handles (user_groups.py), which last. The groups of this file stand behind these handles. The
groups that the package itself uses have no handle.
"""

import ctypes
import sys
import threading
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from datetime import timedelta
from functools import partial
from typing import Any, cast

import torch.distributed as dist

from lightning_replica._compat.groups import NewGroup, answer_new_groups, forget_group, is_registered, open_group
from lightning_replica._compat.torch import (
    backend_of,
    backend_on_host,
    forget_failed_opening,
    give_backend,
    registered_groups,
    set_group_timeout,
)
from lightning_replica.control import keys
from lightning_replica.control.gathering import Gathering
from lightning_replica.control.journal import Journal
from lightning_replica.core.pending_work import all_ended
from lightning_replica.devices.interface import Device
from lightning_replica.errors import CollectiveError
from lightning_replica.groups.forks import leave_groups_to_this_process
from lightning_replica.groups.handles import Handle
from lightning_replica.groups.names import Held
from lightning_replica.groups.patient_store import PatientStore
from lightning_replica.groups.user_groups import UserGroups

# An operation that an abort wakes ends within a few milliseconds.
_PATIENCE_S = 0.1

# How long ranks that are all present may take to connect. [Note: a cut connection] gloo connects in C++, where nothing
# can be aborted. A peer may move on to the next generation before it has answered. Without this limit, the rank that
# connects to it would wait for as long as collectives may take, and hold up the recovery that the peer waits for.
# To make this rare, nobody is called away while it connects (`PatientStore`). tests/groups/test_groups.py fails without
# either.
_CONNECT_S = 10.0
_CONNECT_S_PER_RANK = 0.05  # for a full mesh of a thousand ranks
_GLOO_WAITS = 5  # times as long as it is told, for a connection (gloo's transport/tcp/pair.h, `waitUntil`)


class ProcessGroups:
    """Owns the default group and all groups that are made inside it.

    Args:
        store: The store through which ranks find each other; every generation has its own prefix.
        rank: This rank.
        world_size: Number of ranks.
        device: This rank's device; it determines the backend, and how groups are aborted.
        timeout_s: Seconds after which a collective fails by itself.
        check: Raises when the world moves on; called while groups are opened.
        journal: The journal of collectives, which is written while a script is set up; None for no journal.
        gathering: Brings the members of a group together; None to do that in ``store``.

    Attributes:
        device: This rank's device.
    """

    def __init__(
        self,
        store: dist.Store,
        rank: int,
        world_size: int,
        device: Device,
        timeout_s: float,
        check: Callable[[], None] = lambda: None,
        journal: Journal | None = None,
        gathering: Gathering | None = None,
    ) -> None:
        leave_groups_to_this_process()
        self._store = PatientStore(store, check, timeout_s, gathering)
        self._rank, self._world_size = rank, world_size
        self.device, self._timeout = device, timedelta(seconds=timeout_s)
        self._on_host, self._separate = backend_on_host(device.backend)
        self._connect_timeout = timedelta(
            seconds=min(timeout_s, _CONNECT_S + _CONNECT_S_PER_RANK * world_size) / _GLOO_WAITS
        )
        self._groups: list[dist.ProcessGroup] = []
        self._lock = threading.Lock()
        self._generation = self._with_successor = 0
        self._made: Counter[tuple[int, ...]] = Counter()  # by the package, in this generation
        self._own_thread: int | None = None  # the thread that opens groups for the package
        self._own_backend = device.backend
        journal = Journal(dist.HashStore(), rank, kept=False) if journal is None else journal
        self._handles = UserGroups(
            rank, journal, self._timeout, self._open_behind, self._close, partial(answer_new_groups, None)
        )

    def hold(self) -> None:
        """Give torch its default group: a handle, with nothing behind it until `open`.

        A replacement has only this handle until it reaches the training loop. The journal answers its collectives.
        """
        if self._handles.default is not None and is_registered(self._handles.default):
            return
        answer_new_groups(self._answer)
        excepthook = sys.excepthook
        dist.init_process_group(
            self.device.backend,
            store=dist.PrefixStore("groups", self._store),
            rank=self._rank,
            world_size=self._world_size,
            timeout=self._timeout,
        )
        sys.excepthook = excepthook  # init_process_group has wrapped it

    def open(
        self,
        generation: int,
        make: Callable[[timedelta], Iterable[dist.ProcessGroup]],
        resume: bool = False,
        held: Mapping[int, Held] | None = None,
    ) -> None:
        """Open the default group of ``generation``, then call ``make`` to make the others. Collective.

        All ranks must be about to call it, because connecting has its own time-out, which is passed to ``make``. Groups
        that were open are closed, and the device is restarted if it was stopped.

        Args:
            generation: The generation; it is part of the groups' names.
            make: Makes the package's own groups, the same ones every time.
            resume: Whether the device's connections are taken over from the groups that were open.
            held: The handles of each rank. Afterwards, groups of this generation stand behind them.
        """
        self.hold()
        try:
            kept = self._resumed() if resume else []
            self.device.restart()
            self._close_all()
            self._generation = generation
            self._made.clear()
            with self._package_opens(self._on_host if kept else self.device.backend):
                default = self._open(tuple(range(self._world_size)))
                for group in make(self._connect_timeout):
                    self._own(group)
            self._with_successor = len(self._groups)
            # Groups of user code and groups that `add` made came last in the old list, and have no successor.
            for group, backend in zip(self._groups, kept, strict=False):
                give_backend(group, self._separate, backend, self.device.backend)
            self._handles.connect(generation, default, held or {})
        except RuntimeError as error:
            raise CollectiveError(f"Could not open the process groups of generation {generation}: {error}") from error

    def held(self) -> Held:
        """Return the handles of this rank, to be reported to the others."""
        return self._handles.held()

    def hooks_are_through(self) -> None:
        """Note that all recovery hooks have run: groups made from now on count as made while training."""
        self._handles.hooks_are_through()

    def _resumed(self) -> list[Any]:
        """Return what carries the device's tensors in each group of the package, and outlives the group.

        Raises:
            CollectiveError: If the connections cannot resume. The next generation then begins, and stops the ranks
                whose connections could.
        """
        if not self.device.resume_groups(self._groups):
            raise CollectiveError("the device cannot resume its connections")
        own = self._groups[: self._with_successor]
        with self._lock:
            for group in own:
                forget_group(group, shut_down=False)
        return [backend_of(group, self._separate) for group in own]

    def open_among(self, generation: int, ranks: Sequence[int]) -> None:
        """Open a default group of ``ranks`` only, numbered in this order. All of them call it.

        The run has been given up, so the handles are not needed any more.
        """
        try:
            self.device.restart()
            self._destroy()
            excepthook = sys.excepthook
            dist.init_process_group(
                self.device.backend,
                store=dist.PrefixStore(keys.group(f"among/{generation}"), self._store),
                rank=ranks.index(self._rank),
                world_size=len(ranks),
                timeout=self._connect_timeout,
            )
            sys.excepthook = excepthook
            self._own(cast("dist.ProcessGroup", dist.group.WORLD))
        except RuntimeError as error:
            raise CollectiveError(f"Could not open a process group of {ranks=}: {error}") from error

    def add(self, ranks: list[int]) -> dist.ProcessGroup:
        """Make a group of ``ranks``. Only these ranks call it."""
        try:
            with self._package_opens(self.device.backend):
                group = self._open(tuple(ranks))
        except RuntimeError as error:
            raise CollectiveError(f"Could not open a process group of {ranks=}: {error}") from error
        return group

    def remove(self, group: dist.ProcessGroup) -> None:
        """Destroy a group that `add` made."""
        self._close(group)

    def abort(self) -> None:
        """Abort all groups, including user code's own. This wakes this rank from any collective.

        Any thread may call it, any number of times.
        """
        with self._lock:
            known = [group for group in registered_groups(self.device.backend) if not isinstance(group, Handle)]
            others = [group for group in known if group not in self._groups]
            self.device.abort_groups((*self._groups, *others))

    def leave(self) -> None:
        """Abort all groups, so that the connections to the other ranks close.

        On the host, the groups are destroyed at once; on another device, once it runs again. The abort closes the
        connections, so it does not matter that a traceback may still hold a group.
        """
        self.abort()
        self._handles.disconnect()
        if self.device.is_host:
            self._close_all()

    def close(self) -> None:
        """Abort and destroy all groups."""
        self.abort()
        self._destroy()

    def _destroy(self) -> None:
        """Destroy all groups, and let torch make groups in its own way again."""
        self._close_all()
        answer_new_groups(None)
        self._handles.disconnect()
        self._handles.default = None
        if dist.is_initialized():
            dist.destroy_process_group()
        forget_failed_opening()

    def _close_all(self) -> None:
        with self._lock:
            doomed, self._groups = self._groups, []
            if not all_ended(_PATIENCE_S):
                for group in doomed:
                    _keep_forever(group)
            for group in reversed(doomed):  # the same order on all ranks: NCCL's abort was once a collective
                if group is not dist.group.WORLD:  # the last checkpoint's: torch destroys it with the rest
                    forget_group(group)

    def _close(self, group: dist.ProcessGroup) -> None:
        with self._lock:
            if group in self._groups:
                self._groups.remove(group)
            forget_group(group)

    def _answer(self, wanted: NewGroup) -> dist.ProcessGroup:
        """Make every process group that code in this process asks torch for."""
        if self._own_thread == threading.get_ident():
            return self._open(wanted.ranks)
        return self._handles.answer(wanted)

    @contextmanager
    def _package_opens(self, backend: str) -> Iterator[None]:
        """Mark the groups that this thread opens inside as the package's own: they have no handle."""
        self._own_thread, self._own_backend = threading.get_ident(), backend
        try:
            yield
        finally:
            self._own_thread = None

    def _open(self, ranks: tuple[int, ...]) -> dist.ProcessGroup:
        """Open one of the package's own groups. Its members make groups of the same ranks in the same order."""
        number = self._made[ranks]
        self._made[ranks] += 1
        wanted = NewGroup(ranks, ranks.index(self._rank), self._own_backend, self._connect_timeout)
        return self._own(self._connect(f"{','.join(map(str, ranks))}/{number}", wanted, self._timeout))

    def _open_behind(self, key: str, wanted: NewGroup) -> dist.ProcessGroup:
        """Open the group behind a handle."""
        try:
            return self._own(
                self._connect(f"user/{key}", replace(wanted, timeout=self._connect_timeout), wanted.timeout)
            )
        except RuntimeError as error:
            raise CollectiveError(f"Could not open a process group of ranks {list(wanted.ranks)}: {error}") from error

    def _connect(self, name: str, wanted: NewGroup, timeout: timedelta) -> dist.ProcessGroup:
        name = f"{self._generation}/{name}"
        self._store.meet(name, self._rank, wanted.ranks)
        group = open_group(wanted, f"lightning_replica/{name}", dist.PrefixStore(keys.group(name), self._store))
        self._store.wait_until(self.device.connect(group), f"connections of the device in group {name}")
        if wanted.timeout != timeout:
            set_group_timeout(group, timeout)
        return group

    def _own(self, group: dist.ProcessGroup) -> dist.ProcessGroup:
        with self._lock:
            if group not in self._groups:
                self._groups.append(group)
        return group


def _keep_forever(group: dist.ProcessGroup) -> None:
    """Make sure that ``group`` is never destroyed, not even when the interpreter ends.

    Its idle threads remain, a dozen for each such fault. See [Note: destructors may block] in core/pending_work.py.
    """
    ctypes.pythonapi.Py_IncRef(ctypes.py_object(group))
