"""The store that process groups are opened with: it tells of a lost rank."""

import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch.distributed as dist

from lightning_replica import points


class PatientStore(dist.Store):
    """What torch.distributed opens process groups with; it calls this from C++, and asks for no more than this.

    torch's own stores wait in C++ until the key is there or the time is up: a rank that is lost between the plan and
    the opening of a group, or raises in a hook before it opens one, would keep all others for that long.

    Args:
        store: The store that holds the keys.
        check: Raises when the world moves on.
        timeout_s: After which a wait fails on its own; what torch asks for is how long connecting may take.
    """

    def __init__(self, store: dist.Store, check: Callable[[], None], timeout_s: float) -> None:
        super().__init__()
        self._store, self._check, self._timeout_s = store, check, timeout_s

    def wait(self, keys: list[str], timeout: timedelta | None = None) -> None:
        """Wait until all ``keys`` are there, and tell the watcher that this rank waits.

        It would be taken for the one that hangs otherwise, and killed in place of the member that does not come
        (tests/launch/test_hang.py::test_a_rank_stops_while_its_peer_gives_it_its_shard).
        """
        deadline = time.monotonic() + self._timeout_s
        pause_s = 0.0005
        try:
            while not self._store.check(keys):
                points.waits()
                self._check()
                if time.monotonic() > deadline:
                    raise dist.DistStoreError(f"Waited in vain for {keys} in the store.")
                time.sleep(pause_s)
                pause_s = min(0.01, 1.5 * pause_s)
        finally:
            points.goes_on()

    def get(self, key: str) -> bytes:
        """The value of ``key``, once there is one."""
        self.wait([key])
        return self._store.get(key)

    def set(self, key: str, value: Any) -> None:
        """As in every store."""
        self._store.set(key, value)

    def add(self, key: str, amount: int) -> int:
        """As in every store."""
        return self._store.add(key, amount)

    def compare_set(self, key: str, expected: str, desired: str) -> bytes:
        """As in every store."""
        return self._store.compare_set(key, expected, desired)

    def check(self, keys: list[str]) -> bool:
        """As in every store."""
        return self._store.check(keys)

    def delete_key(self, key: str) -> bool:
        """As in every store."""
        return self._store.delete_key(key)

    def set_timeout(self, timeout: timedelta) -> None:
        """Nothing changes: see `timeout_s`."""
