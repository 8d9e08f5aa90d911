"""The store that process groups are opened with; its waits end early when a rank is lost."""

import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch.distributed as dist

from lightning_replica.core import points


class PatientStore(dist.Store):
    """The store that torch.distributed opens process groups with. torch calls it from C++, and only these methods.

    torch's own stores wait in C++ until the key is there or the wait times out. If a rank is lost between the plan and
    the opening of a group, or raises in a hook before it opens one, all other ranks would wait for that long.

    Args:
        store: The store that holds the keys.
        check: Raises when the world moves on.
        timeout_s: Seconds after which a wait fails by itself. The time-out that torch passes is ignored: it says how
            long connecting may take.
    """

    def __init__(self, store: dist.Store, check: Callable[[], None], timeout_s: float) -> None:
        super().__init__()
        self._store, self._check, self._timeout_s = store, check, timeout_s

    def wait(self, keys: list[str], timeout: timedelta | None = None) -> None:
        """Wait until all ``keys`` are there, and tell the watcher that this rank waits.

        Otherwise the supervisor would take this rank for the one that hangs, and kill it instead of the member that
        does not come (tests/launch/test_hang.py::test_a_rank_stops_while_its_peer_gives_it_its_shard).
        """
        deadline = time.monotonic() + self._timeout_s
        pause_s = 0.0005
        try:
            while not self._store.check(keys):
                points.waits()
                self._check()
                if time.monotonic() > deadline:
                    raise dist.DistStoreError(f"Timed out waiting for {keys} in the store.")
                time.sleep(pause_s)
                pause_s = min(0.01, 1.5 * pause_s)
        finally:
            points.goes_on()

    def get(self, key: str) -> bytes:
        """Wait until ``key`` has a value, and return the value."""
        self.wait([key])
        return self._store.get(key)

    def set(self, key: str, value: Any) -> None:
        """Call ``set`` of the underlying store."""
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
