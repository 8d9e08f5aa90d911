"""The store of a run on several nodes, as one process sees it."""

import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any, Final, TypeAlias, TypeVar

import torch.distributed as dist

from lightning_replica.stores.address import Address
from lightning_replica.stores.reach import reach

T = TypeVar("T")

Failover: TypeAlias = Callable[[int], Address]
"""Waits until the nodes have agreed on the n-th store that takes the place of a lost one, and returns its address."""

_PAUSE_S: Final = 0.2


class SharedStore(dist.Store):
    """A connection to the store of a run, which moves to another store when the first is lost.

    A store is lost when its machine refuses connections: the process that served it has ended. A connection that breaks
    for another reason is opened again. A store on etcd is never lost: its members come back. The other store lacks what
    was in the first. It says that the run is given up, so that the ranks that are left write the last checkpoint. One
    thread at a time may use a connection.

    Args:
        address: The address of the first store.
        failover: Finds the next one.
    """

    def __init__(self, address: Address, failover: Failover) -> None:
        super().__init__()
        self._address, self._failover, self._moves = address, failover, 0
        self._store: dist.Store | None = None

    def _ask(self, question: Callable[[dist.Store], T]) -> T:
        while True:
            try:
                self._store = self._store or reach(self._address)
                return question(self._store)
            except ConnectionRefusedError:
                self._moves += 1
                self._address = self._failover(self._moves)
            except (OSError, dist.DistNetworkError):
                self._store = None
                time.sleep(_PAUSE_S)

    def get(self, key: str) -> bytes:
        """Wait until ``key`` has a value, and return the value."""
        return self._ask(lambda store: store.get(key))

    def multi_get(self, keys: list[str]) -> list[bytes]:
        """Wait until all ``keys`` have values, and return the values."""
        return self._ask(lambda store: store.multi_get(keys))

    def set(self, key: str, value: Any) -> None:
        """Give ``key`` a value."""

        def set_and_see(store: dist.Store) -> None:
            store.set(key, value)
            store.check([key])  # a store does not answer to `set`, and a broken connection swallows it

        self._ask(set_and_see)

    def add(self, key: str, amount: int) -> int:
        """Add to a counter, and return its new value."""
        return self._ask(lambda store: store.add(key, amount))

    def compare_set(self, key: str, expected: str, desired: str) -> bytes:
        """Give ``key`` the value ``desired`` if it has the value ``expected``, or none; return its value."""
        return self._ask(lambda store: store.compare_set(key, expected, desired))

    def check(self, keys: list[str]) -> bool:
        """Return whether all ``keys`` have values."""
        return self._ask(lambda store: store.check(keys))

    def wait(self, keys: list[str], timeout: timedelta | None = None) -> None:
        """Wait until all ``keys`` have values. Raise `DistStoreError` after ``timeout``."""
        self._ask(lambda store: store.wait(keys) if timeout is None else store.wait(keys, timeout))

    def delete_key(self, key: str) -> bool:
        """Delete ``key``; return whether it had a value."""
        return self._ask(lambda store: store.delete_key(key))

    def set_timeout(self, timeout: timedelta) -> None:
        """Do nothing: a wait ends when there is a value."""
