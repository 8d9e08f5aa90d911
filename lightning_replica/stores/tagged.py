"""A store whose values carry tags, so that values which strangers have written are ignored.

torch's store answers everyone who can reach its port. A tag proves that a process with the job's secret has written
this value under this key. A value without a valid tag counts as missing, and is replaced by the next process that has
something to write there. Counters have no tags: torch's store adds by itself. So a counter is never more than a hint
here, and what it leads to is a value with a tag.

This protects against wrong values, not against a stranger who removes values, or writes them again and again: a run
may have to wait for ever. Nor does it hide values from anyone.
"""

import base64
import hashlib
import hmac
import time
from datetime import timedelta
from typing import Any, Final

import torch.distributed as dist

from lightning_replica.core.messages import warn
from lightning_replica.stores.secret import FILE_VARIABLE, VARIABLE, own_secret

_BYTES: Final = 18  # of the digest; base64 then needs no padding
_LENGTH: Final = len(base64.b64encode(bytes(_BYTES)))
_PAUSE_S: Final = 0.2
_reported: set[str] = set()  # keys: this process tells once of each


class TaggedStore(dist.Store):
    """A connection to a store of which all values but counters carry tags.

    Args:
        store: A connection to the store, or to a part of it.
        secret: The secret of the job.
        prefix: What keys of that part begin with in the whole store: values of one part are not valid in another.
    """

    def __init__(self, store: dist.Store, secret: bytes, prefix: str = "") -> None:
        super().__init__()
        self._store, self._secret, self._prefix = store, secret, prefix

    def set(self, key: str, value: Any) -> None:
        """Give ``key`` a value."""
        self._store.set(key, self._with_tag(key, value))  # type: ignore[arg-type]

    def get(self, key: str) -> bytes:
        """Wait until ``key`` has a value, and return the value."""
        return self.multi_get([key])[0]

    def multi_get(self, keys: list[str]) -> list[bytes]:
        """Wait until all ``keys`` have values, and return the values."""
        while True:
            found = self._store.multi_get(keys) if len(keys) > 1 else [self._store.get(key) for key in keys]
            values = [self._value(key, each) for key, each in zip(keys, found, strict=True)]
            valid = [value for value in values if value is not None]
            if len(valid) == len(keys):
                return valid
            time.sleep(_PAUSE_S)  # until somebody has replaced what a stranger wrote

    def peek(self, keys: list[str]) -> list[bytes]:
        """Return the values of ``keys``, which have had values; an empty one where a stranger has written over it."""
        found = self._store.multi_get(keys)
        return [self._value(key, each) or b"" for key, each in zip(keys, found, strict=True)]

    def check(self, keys: list[str]) -> bool:
        """Return whether all ``keys`` have values."""
        if not self._store.check(keys):
            return False
        found = self._store.multi_get(keys)
        return None not in [self._value(key, each) for key, each in zip(keys, found, strict=True)]

    def compare_set(self, key: str, expected: Any, desired: Any) -> bytes:
        """Give ``key`` the value ``desired`` if it has the value ``expected``, or none; return its value."""
        current, new = self._with_tag(key, expected) if expected else b"", self._with_tag(key, desired)
        while True:
            found = self._store.compare_set(key, current, new)  # type: ignore[arg-type]
            value = self._value(key, found)
            if value is not None and (value or expected or found == new):
                return value
            if value is None and expected:
                return _to_bytes(expected)  # torch's answer where a key has no value
            current = found  # no valid value, or an empty one, which is the same as none here

    def add(self, key: str, amount: int) -> int:
        """Add to a counter, and return its new value. Counters carry no tags."""
        return self._store.add(key, amount)

    def wait(self, keys: list[str], timeout: timedelta | None = None) -> None:
        """Wait until all ``keys`` have values. Raise `DistStoreError` after ``timeout``."""
        deadline = None if timeout is None else time.monotonic() + timeout.total_seconds()
        while True:
            if deadline is None:
                self._store.wait(keys)
            else:
                self._store.wait(keys, timedelta(seconds=max(0.001, deadline - time.monotonic())))
            if self.check(keys):
                return
            if deadline is not None and time.monotonic() > deadline:
                raise dist.DistStoreError(f"wait timeout for {keys}: what is there has no valid tag")
            time.sleep(_PAUSE_S)

    def delete_key(self, key: str) -> bool:
        """Delete ``key``; return whether it had a value."""
        return self._store.delete_key(key)

    def set_timeout(self, timeout: timedelta) -> None:
        """Set the time-out of the connection."""
        self._store.set_timeout(timeout)

    def _with_tag(self, key: str, value: Any) -> bytes:
        given = _to_bytes(value)
        return self._tag(key, given) + given

    def _value(self, key: str, found: bytes) -> bytes | None:
        """Return the value in what was found under a key; None if it has no valid tag."""
        tag, value = found[:_LENGTH], found[_LENGTH:]
        if hmac.compare_digest(tag, self._tag(key, value)):
            return value
        if key not in _reported:
            _reported.add(key)
            warn(
                f"the value of the key {key!r} in the store is ignored, as its tag is not valid: the process that wrote"
                f" it has another secret, or none ({VARIABLE}, {FILE_VARIABLE})."
            )
        return None

    def _tag(self, key: str, value: bytes) -> bytes:
        # The length of the key comes first: nobody can move bytes from the value into the key.
        name = (f"{self._prefix}/{key}" if self._prefix else key).encode()
        message = b"%d %s%s" % (len(name), name, value)
        return base64.b64encode(hmac.digest(self._secret, message, hashlib.sha256)[:_BYTES])


def with_tags(store: dist.Store, prefix: str = "") -> dist.Store:
    """Return a store that adds and checks tags if this process was started with a secret; else ``store``.

    Args:
        store: A connection to a store, or to a part of it.
        prefix: See `TaggedStore`.

    Raises:
        ConfigurationError: If there is something wrong with the secret.
    """
    secret = own_secret()
    return TaggedStore(store, secret, prefix) if secret else store


def peek(store: dist.Store, keys: list[str]) -> list[bytes]:
    """Return the values of ``keys``, which have had values. Do not wait where a stranger has written over one."""
    return store.peek(keys) if isinstance(store, TaggedStore) else store.multi_get(keys)


def _to_bytes(value: Any) -> bytes:
    return value.encode() if isinstance(value, str) else bytes(value)
