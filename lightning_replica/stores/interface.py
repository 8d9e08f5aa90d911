"""What the package needs of a store."""

from typing import Any, Protocol


class Store(Protocol):
    """The part of `torch.distributed.Store` that the package uses."""

    def set(self, key: str, value: Any) -> None:
        """Give ``key`` a value."""

    def get(self, key: str) -> bytes:
        """Wait until ``key`` has a value, and return the value."""

    def multi_get(self, keys: list[str]) -> list[bytes]:
        """Wait until all ``keys`` have values, and return the values."""

    def check(self, keys: list[str]) -> bool:
        """Return whether all ``keys`` have values."""

    def compare_set(self, key: str, expected: str, desired: str) -> bytes:
        """Give ``key`` the value ``desired`` if it has the value ``expected``, or none; return its value."""

    def add(self, key: str, amount: int) -> int:
        """Add to a counter, and return its new value."""
