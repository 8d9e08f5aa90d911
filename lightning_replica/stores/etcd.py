"""A store that outlives its machines: etcd keeps it on several of them, of which a minority may fail.

A majority of etcd's members stands for every answer, so no process reads an older value than before. The keys lie under
``lightning_replica/`` in etcd, as others may use the same one. The run after the next deletes them (`nodes.attempt`).
"""

import base64
import math
import time
from datetime import timedelta
from typing import Any, Final, NamedTuple, TypeAlias

import torch.distributed as dist

from lightning_replica.stores.address import EtcdAddress
from lightning_replica.stores.etcd_members import EtcdMembers

_Json: TypeAlias = dict[str, Any]

_ROOT: Final = "lightning_replica/"
_WATCH_S: Final = 5.0  # after so long without news a wait asks again: the member that it listens to may be gone
_CHUNK: Final = 128  # operations in one request; etcd's default of --max-txn-ops


class _Entry(NamedTuple):
    """What is under a key: the value, and the revision of the store that has written it; 0 if there is none."""

    value: bytes
    revision: int


class EtcdStore(dist.Store):
    """A connection to a store on etcd. It does what torch's TCPStore does, except that its waits have no time-out.

    A request whose answer is lost is sent again. No harm is done if etcd carries out both, even much later: a request
    changes a key only if it is as this process knows it. Three answers may then differ: `add` counts twice,
    `delete_key` finds no value, and `compare_set` returns what another process has made of ``desired`` since.

    If no member of etcd answers, all methods raise `DistNetworkError`, and may be called again. This is no
    ConnectionRefusedError, with which a store is lost for good. What etcd refuses to do, as to take a value of more
    than 1.5 MiB, raises `DistStoreError`. One thread at a time may use a connection.

    Args:
        address: Where etcd is. Nothing connects before the first request.
    """

    def __init__(self, address: EtcdAddress) -> None:
        super().__init__()
        self._members = EtcdMembers(address)
        self._revision = 0  # the newest of the store that this connection has heard of

    def set(self, key: str, value: Any) -> None:
        """Give ``key`` a value."""
        while self._change(key, _put(key, value), self._revision, or_before=True) is not None:
            pass  # another process has written the key since; this connection has heard of it now

    def get(self, key: str) -> bytes:
        """Wait until ``key`` has a value, and return the value."""
        return self.multi_get([key])[0]

    def multi_get(self, keys: list[str]) -> list[bytes]:
        """Wait until all ``keys`` have values, and return the values."""
        return [entry.value for entry in self._wait(keys)]

    def check(self, keys: list[str]) -> bool:
        """Return whether all ``keys`` have values."""
        entries, _ = self._read(keys, keys_only=True)
        return all(entry.revision for entry in entries)

    def compare_set(self, key: str, expected: str | bytes, desired: str | bytes) -> bytes:
        """Give ``key`` the value ``desired`` if it has the value ``expected``, or none; return its value.

        As in TCPStore, a key that has no value gets one only if ``expected`` is empty. Otherwise ``expected`` is
        returned, and the key still has none.
        """
        before = _to_bytes(expected)
        found: _Entry | None = self._entry(key) if before else _Entry(b"", 0)
        while found is not None:
            if before and not found.revision:
                return before
            if found.value != before:
                return found.value
            found = self._change(key, _put(key, desired), found.revision)
        return _to_bytes(desired)

    def add(self, key: str, amount: int) -> int:
        """Add to a counter, and return its new value."""
        total = amount
        found = self._change(key, _put(key, str(total)), 0)
        while found is not None:
            total = _number(key, found) + amount
            if amount == 0:
                break  # there is nothing to write
            found = self._change(key, _put(key, str(total)), found.revision)
        return total

    def wait(self, keys: list[str], timeout: timedelta | None = None) -> None:
        """Wait until all ``keys`` have values. Raise `DistStoreError` after ``timeout``."""
        self._wait(keys, math.inf if timeout is None else timeout.total_seconds(), keys_only=True)

    def delete_key(self, key: str) -> bool:
        """Delete ``key``; return whether it had a value."""
        found: _Entry | None = self._entry(key)
        while found is not None:
            if not found.revision:
                return False
            found = self._change(key, {"request_delete_range": {"key": _name(key)}}, found.revision)
        return True

    def forget(self, prefix: str) -> None:
        """Delete all keys that begin with ``prefix``, for example those of an earlier run."""
        first = (_ROOT + prefix).encode()
        after = first[:-1] + bytes([first[-1] + 1])  # prefixes end in ASCII
        keys = [base64.b64encode(each).decode() for each in (first, after)]
        self._transact({"success": [{"request_delete_range": {"key": keys[0], "range_end": keys[1]}}]})

    deleteKey = delete_key  # torch's PrefixStore looks for this name, and for the Python names of all other methods

    def set_timeout(self, timeout: timedelta) -> None:
        """Do nothing: a wait ends when there is a value."""

    def _wait(self, keys: list[str], timeout_s: float = math.inf, keys_only: bool = False) -> list[_Entry]:
        """Wait until all ``keys`` have values, and return what is under them."""
        deadline = time.monotonic() + timeout_s
        while True:
            entries, revision = self._read(keys, keys_only)
            missing = [key for key, entry in zip(keys, entries, strict=True) if not entry.revision]
            if not missing:
                return entries
            left_s = deadline - time.monotonic()
            if left_s <= 0:
                raise dist.DistStoreError(f"Timed out after {timeout_s:g} s waiting for {missing} in the store.")
            # From the next revision on: no value is missed that comes before the watch begins.
            self._members.watch([_name(key) for key in missing], revision + 1, min(left_s, _WATCH_S))

    def _entry(self, key: str) -> _Entry:
        entries, _ = self._read([key])
        return entries[0]

    def _read(self, keys: list[str], keys_only: bool = False) -> tuple[list[_Entry], int]:
        """Return what is under ``keys``, and the revision of the store when the first were read."""
        entries: list[_Entry] = []
        revisions: list[int] = []
        for first in range(0, len(keys), _CHUNK):
            names = map(_name, keys[first : first + _CHUNK])
            answer = self._transact({"success": [{"request_range": {"key": n, "keys_only": keys_only}} for n in names]})
            entries += map(_entry, answer["responses"])
            revisions.append(int(answer["header"]["revision"]))
        return entries, min(revisions, default=0)

    def _change(self, key: str, change: _Json, revision: int, or_before: bool = False) -> _Entry | None:
        """Change ``key`` if it was last written at a revision of the store.

        After the change this holds no more. So a request does nothing if a silent member carries it out only after it
        was sent again. The exception is a key that was set and then deleted: it may come back.

        Args:
            key: The key.
            change: The operation.
            revision: The revision; 0 if there must be no value.
            or_before: Whether the key may have been written before, or not at all.

        Returns:
            None if the key was changed; otherwise what is there.
        """
        relation, limit = ("LESS", revision + 1) if or_before else ("EQUAL", revision)
        condition = {"key": _name(key), "target": "MOD", "result": relation, "mod_revision": limit}
        look = {"request_range": {"key": _name(key)}}
        answer = self._transact({"compare": [condition], "success": [change], "failure": [look]})
        return None if answer.get("succeeded") else _entry(answer["responses"][0])

    def _transact(self, transaction: _Json) -> _Json:
        answer = self._members.transact(transaction)
        self._revision = max(self._revision, int(answer["header"]["revision"]))
        return answer


def _put(key: str, value: Any) -> _Json:
    return {"request_put": {"key": _name(key), "value": base64.b64encode(_to_bytes(value)).decode()}}


def _name(key: str) -> str:
    return base64.b64encode((_ROOT + key).encode()).decode()


def _entry(response: _Json) -> _Entry:
    """Return what is under a key. etcd leaves out what is empty."""
    found = response["response_range"].get("kvs")
    return (
        _Entry(base64.b64decode(found[0].get("value", "")), int(found[0]["mod_revision"])) if found else _Entry(b"", 0)
    )


def _number(key: str, entry: _Entry) -> int:
    try:
        return int(entry.value) if entry.revision else 0
    except ValueError as error:
        raise dist.DistStoreError(f"{key!r} is no counter: its value is {entry.value!r}.") from error


def _to_bytes(value: Any) -> bytes:
    return value.encode() if isinstance(value, str) else memoryview(value).tobytes()
