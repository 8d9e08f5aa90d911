"""Gathers what ranks say, node by node. One rank draws the conclusion, and all ranks read it.

A rank leaves its part in the store of its node. The last rank of the node posts the parts of all in one value in the
store of the run. The last rank that posts reads all values and concludes. So the store of the run gets a few messages
from each node, however many ranks it has, and no rank reads what all others have said. Without a store of the node,
each rank posts for itself.

A topic has one result, which is written once: the conclusion, or that ranks were called away before all had given
their parts (`call_off`). So either all ranks have the conclusion or none has.
"""

import json
import queue
import threading
from bisect import bisect_left
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, Final, TypeAlias

import torch.distributed as dist

from lightning_replica import errors
from lightning_replica.control import keys
from lightning_replica.control.untrusted import from_json
from lightning_replica.errors import Interrupted, ProtocolError, RecoveryError, ReplicaError
from lightning_replica.stores.interface import Store

Conclude: TypeAlias = Callable[[list[dict[str, Any]]], Any]
"""Makes plain data for JSON of the parts of all ranks, in order of rank. Called on one rank; all get its error."""

_ERRORS: Final = {kind.__name__: kind for kind in vars(errors).values() if isinstance(kind, type)}
_CALLED_OFF: Final = '{"called off": true}'


@dataclass(frozen=True)
class LocalRanks:
    """The ranks of one node, and how they leave messages for each other.

    Attributes:
        store: Their store. This connection is the calling thread's.
        count: Number of ranks in a slot: those with the same ``rank // count`` are on one node.
        open: Opens new connections for another thread, to the store of the run and to this one.
    """

    store: Store
    count: int
    open: Callable[[], tuple[Store, Store]]


class Gathering:
    """What one process gives to gatherings and learns from them.

    Args:
        store: The store of the run.
        local: The ranks of this node; None if each rank posts for itself, in a slot of its own.

    Attributes:
        near: The store in which this process reads what has been agreed on.
    """

    def __init__(self, store: Store, local: LocalRanks | None = None) -> None:
        self._store = store
        self.near: Store = store if local is None else local.store
        self._count = 1 if local is None else local.count
        self._forwarder = None if local is None else _ResultForwarder(local.open)

    def give(self, topic: str, rank: int, part: dict[str, Any], ranks: Sequence[int], conclude: Conclude) -> None:
        """Give a rank's part to a topic. Does not wait for other ranks.

        Args:
            topic: Name of the topic. A rank gives one part to it.
            rank: This rank.
            part: Plain data.
            ranks: The ranks that take part, in ascending order; the same on all of them.
            conclude: See `Conclude`.
        """
        parts = [json.dumps(part)]
        if self._forwarder is not None:
            mates = self._mates(rank, ranks)
            self.near.set(keys.share(topic, rank), parts[0])
            if self.near.add(keys.come_here(topic, rank // self._count), 1) < len(mates):
                return
            parts = [each.decode() for each in self.near.multi_get([keys.share(topic, mate) for mate in mates])]
            self._forwarder.fetch(keys.result(topic))  # before `_post`, which may raise
        self._post(topic, rank // self._count, parts, self._slots(ranks), conclude)

    def meet(self, topic: str, rank: int, ranks: Sequence[int], wait: Callable[[Callable[[], bool]], None]) -> None:
        """Wait until all ``ranks`` have come to a topic. If this rank is called away before, nobody passes.

        Args:
            topic: Name of the topic.
            rank: This rank.
            ranks: See `give`.
            wait: Waits until a function returns true. Its errors are raised, unless all ranks have come by then.

        Raises:
            Interrupted: If another rank was called away.
        """
        self.give(topic, rank, {}, ranks, lambda _: None)
        try:
            wait(lambda: self.has_result(topic))
        except Exception:
            if self.call_off(topic):
                raise
        else:
            self.result(topic)

    def has_result(self, topic: str) -> bool:
        """Return whether the result of a topic is known on this node."""
        return self.near.check([keys.result(topic)])

    def result(self, topic: str) -> Any:
        """Wait for the result of a topic and return the conclusion.

        Raises:
            Interrupted: If the topic was called off.
            ReplicaError: What the conclusion has raised.
        """
        return _read(topic, self.near.get(keys.result(topic)))

    def known(self, topic: str) -> bool:
        """Return whether a topic has a result already, because this process replaces one that gave a part to it."""
        key = keys.result(topic)
        if not self._store.check([key]):
            return False
        if self.near is not self._store:
            self.near.set(key, self._store.get(key))
        return True

    def call_off(self, topic: str) -> bool:
        """End a topic without a conclusion, as this rank waits no longer. Return False if there is a conclusion."""
        return self._store.compare_set(keys.result(topic), "", _CALLED_OFF) == _CALLED_OFF.encode()

    def missing(self, topic: str, rank: int, ranks: Sequence[int]) -> list[int]:
        """Return the ranks that have not given their parts, with all ranks of other nodes that lack such a rank.

        Called by a rank that has given its own.
        """
        own = rank // self._count
        mates = [] if self._forwarder is None else self._mates(rank, ranks)
        missing = [mate for mate in mates if not self.near.check([keys.share(topic, mate)])]
        others = [slot for slot in self._slots(ranks) if slot != own]
        gone = {slot for slot in others if not self._store.check([keys.posted(topic, slot)])}
        return sorted([*missing, *(each for each in ranks if each // self._count in gone)])

    def close(self) -> None:
        """End the thread that fetches results, unless it waits for one."""
        if self._forwarder is not None:
            self._forwarder.close()

    def _mates(self, rank: int, ranks: Sequence[int]) -> Sequence[int]:
        """Return those of ``ranks`` that are on the node of ``rank``."""
        first = rank // self._count * self._count
        return ranks[bisect_left(ranks, first) : bisect_left(ranks, first + self._count)]

    def _slots(self, ranks: Sequence[int]) -> Sequence[int]:
        """Return the slots of some ranks. All ranks are mostly a range, and they are many."""
        if isinstance(ranks, range):
            return range(ranks[0] // self._count, ranks[-1] // self._count + 1)
        return sorted({rank // self._count for rank in ranks})

    def _post(self, topic: str, slot: int, own: list[str], slots: Sequence[int], conclude: Conclude) -> None:
        """Post the parts of all ranks of a slot. If all others have posted, conclude."""
        self._store.set(keys.posted(topic, slot), f"[{', '.join(own)}]")
        # Not `==`: if a connection breaks, `SharedStore` adds twice, and no rank might see the exact number.
        if self._store.add(keys.come(topic), 1) < len(slots):
            return
        posts = self._store.multi_get([keys.posted(topic, each) for each in slots])
        try:
            parts = [part for each, post in zip(slots, posts, strict=True) for part in _parts(topic, each, post)]
            said = json.dumps({"conclusion": conclude(parts)})
        except ReplicaError as error:
            said = json.dumps({"error": [type(error).__name__, str(error)]})
        except Exception as error:  # a bug: the other ranks must not wait
            said = json.dumps({"error": [RecoveryError.__name__, f"{type(error).__name__}: {error}"]})
            self._store.compare_set(keys.result(topic), "", said)
            raise
        self._store.compare_set(keys.result(topic), "", said)


def _parts(topic: str, slot: int, post: bytes) -> list[dict[str, Any]]:
    """Return the parts of the ranks of a slot.

    Raises:
        ProtocolError: If what was posted are no parts. The recovery then begins again, in another generation.
    """
    try:
        parts = from_json(post)
    except ValueError:
        parts = None
    if not isinstance(parts, list) or not all(isinstance(part, dict) for part in parts):
        raise ProtocolError(f"the value of the key {keys.posted(topic, slot)!r} in the store is of a stranger")
    return parts


def _read(topic: str, value: bytes) -> Any:
    try:
        said = from_json(value)
        name, text = said.get("error", ("", ""))
    except (ValueError, TypeError, AttributeError) as bad:
        raise ProtocolError(f"the value of the key {keys.result(topic)!r} in the store is of a stranger") from bad
    if name:
        raise _ERRORS.get(name, RecoveryError)(text)
    if "conclusion" not in said:
        raise Interrupted("other ranks were called away")
    return said["conclusion"]


class _ResultForwarder:
    """Waits for results in the store of the run and brings them to the store of the node, in a thread of its own.

    It has no time-out. A rank that does not wait any longer calls the topic off, and that is a result too.
    """

    def __init__(self, open_stores: Callable[[], tuple[Store, Store]]) -> None:
        self._open = open_stores
        self._wanted: queue.SimpleQueue[str | None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None

    def fetch(self, key: str) -> None:
        """Bring the value of a key as soon as there is one."""
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="lightning_replica-results", daemon=True)
            self._thread.start()
        self._wanted.put(key)

    def close(self) -> None:
        """End the thread as soon as it has brought what was wanted."""
        self._wanted.put(None)

    def _run(self) -> None:
        with suppress(OSError, dist.DistError):  # the supervisor is gone, and ends this process
            run, near = self._open()
            while (key := self._wanted.get()) is not None:
                near.set(key, run.get(key))
