"""Stores that process groups are opened with: one that tells of a lost rank, one for a rank that is alone."""

import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch.distributed as dist


class LonelyStore(dist.Store):
    """The store of a replacement that has not joined the others: barriers are passed, nothing is ever received."""

    def wait(self, keys: list[str], timeout: timedelta | None = None) -> None:
        """Whoever is waited for has passed here long ago."""

    def get(self, key: str) -> bytes:
        """Refuses: what another rank would have to say."""
        raise dist.DistStoreError(
            "This replacement has not joined the others yet, so no process group of its own can be opened. Open it in"
            " `RecoveryCallback.on_recovery_regroup`, or leave the backend to `torch.distributed.new_group`."
        )

    def set(self, key: str, value: Any) -> None:
        """Nobody reads it."""

    def add(self, key: str, amount: int) -> int:
        """Nobody else counts."""
        return amount

    def check(self, keys: list[str]) -> bool:
        """See `wait`."""
        return True

    def set_timeout(self, timeout: timedelta) -> None:
        """Nothing is waited for."""


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
        """Waits until all ``keys`` are there."""
        deadline = time.monotonic() + self._timeout_s
        pause_s = 0.0005
        while not self._store.check(keys):
            self._check()
            if time.monotonic() > deadline:
                raise dist.DistStoreError(f"Waited in vain for {keys} in the store.")
            time.sleep(pause_s)
            pause_s = min(0.01, 1.5 * pause_s)

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
