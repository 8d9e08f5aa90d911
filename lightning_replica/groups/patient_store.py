"""The store that process groups are opened with; its waits end early when a rank is lost."""

import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

import torch.distributed as dist

from lightning_replica.control import keys
from lightning_replica.control.gathering import Gathering
from lightning_replica.core.polling import poll

# How long a member that is about to open a group may take to publish its address. After that it may have died.
_PRESENT_S = 1.0
_NCCL_FAILED = "exception_dump"  # torch's ProcessGroupNCCL.cpp, kStoreDumpKey
_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 0.0005, 0.01


class PatientStore(dist.Store):
    """The store that torch.distributed opens process groups with. torch calls it from C++, and only these methods.

    torch's own stores wait in C++ until the key is there or the wait times out. If a rank is lost between the plan and
    the opening of a group, or raises in a hook before it opens one, all other ranks would wait for that long. So the
    members of a group first meet (`meet`), where the world may call them away. Then they connect. Whoever left at that
    point would leave a peer behind that waits for it in C++, so nobody is called away from a wait that is short.

    Args:
        store: The store that holds the keys.
        check: Raises when the world moves on.
        timeout_s: Seconds after which a wait fails by itself. The time-out that torch passes is ignored: it says how
            long connecting may take.
        gathering: Brings the members of a group together.
    """

    def __init__(
        self, store: dist.Store, check: Callable[[], None], timeout_s: float, gathering: Gathering | None = None
    ) -> None:
        super().__init__()
        self._store, self._check, self._timeout_s = store, check, timeout_s
        self._gathering = Gathering(store) if gathering is None else gathering

    def meet(self, name: str, rank: int, ranks: Sequence[int]) -> None:
        """Wait until all members of the group ``name`` are about to open it.

        Args:
            name: Name of the group.
            rank: This rank.
            ranks: The members.

        Raises:
            Interrupted: If another member was called away.
        """
        members = sorted(ranks)

        def wait(ready: Callable[[], bool]) -> None:
            self._wait(ready, lambda: f"members {members} of a process group", 0.0)

        self._gathering.meet(keys.opening(name), rank, members, wait)

    def wait_until(self, ready: Callable[[], bool], what: str) -> None:
        """Wait until ``ready()`` returns true.

        Args:
            ready: Returns whether the wait is over.
            what: What is waited for, for the message of the time-out.

        Raises:
            Interrupted: If the world moves on.
        """
        self._wait(ready, lambda: what, 0.0)

    def wait(self, keys: list[str], timeout: timedelta | None = None) -> None:
        """Wait until all ``keys`` are there."""
        self._wait(lambda: self._store.check(keys), lambda: f"{keys} in the store", _PRESENT_S)

    def _wait(self, ready: Callable[[], bool], what: Callable[[], str], patience_s: float) -> None:
        """Wait, and tell the watcher that this rank waits; after ``patience_s``, the world may call it away.

        Otherwise the supervisor would take this rank for the one that hangs, and kill it instead of the member that
        does not come (tests/launch/test_hang.py::test_a_rank_stops_while_its_peer_gives_it_its_shard).
        """
        began = time.monotonic()

        def look_around() -> None:
            waited_s = time.monotonic() - began
            if waited_s >= patience_s:
                self._check()
            if waited_s > self._timeout_s:
                raise dist.DistStoreError(f"Timed out waiting for {what()}.")

        poll(ready, look_around, _FIRST_PAUSE_S, _LONGEST_PAUSE_S)

    def get(self, key: str) -> bytes:
        """Wait until ``key`` has a value, and return the value."""
        self.wait([key])
        return self._store.get(key)

    def set(self, key: str, value: Any) -> None:
        """Call ``set`` of the underlying store, but for what NCCL's watchdog says of an error.

        torch's heartbeat monitor ends each process that finds this in the store, and a replacement would find it.
        """
        if not key.endswith(_NCCL_FAILED):
            self._store.set(key, value)

    def add(self, key: str, amount: int) -> int:
        """Call ``add`` of the underlying store."""
        return self._store.add(key, amount)

    def compare_set(self, key: str, expected: str, desired: str) -> bytes:
        """Call ``compare_set`` of the underlying store."""
        return self._store.compare_set(key, expected, desired)

    def check(self, keys: list[str]) -> bool:
        """Call ``check`` of the underlying store."""
        return self._store.check(keys)

    def delete_key(self, key: str) -> bool:
        """Call ``delete_key`` of the underlying store."""
        return self._store.delete_key(key)

    def set_timeout(self, timeout: timedelta) -> None:
        """Do nothing: `timeout_s` limits every wait."""
