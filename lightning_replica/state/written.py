"""A record of what a rank has written since each snapshot, because a rank that goes back to one writes it again.

The rank keeps the record in memory, and copies it to the store for a process that may have to take the rank's place.
"""

import json
from collections import Counter
from typing import Any

from lightning_replica.control import keys
from lightning_replica.core.recoverable import Kind
from lightning_replica.stores.interface import Store


class Written:
    """A record of written things of one kind, each identified by a text.

    Args:
        store: The store in which a replacement finds the record.
        what: The name of the kind.
        is_replacement: Whether this process is a replacement, and begins with its predecessor's record.

    Attributes:
        begun: What the predecessor has begun to write, and what it has noted with it; None if it has written all of it.
    """

    def __init__(self, store: Store, what: str, is_replacement: bool) -> None:
        self._store, self._key = store, keys.written(what)
        self._since: dict[tuple[Kind, int], list[str]] = {}
        self._written_before: Counter[str] = Counter()  # what was written before this rank went back, and will be again
        self._back: tuple[Kind, int] | None = None  # the snapshot that this rank has gone back to
        self._anew: set[tuple[Kind, int]] = set()  # snapshots taken since then
        self.begun: tuple[str, Any] | None = None
        if is_replacement and store.check([self._key]):
            since, begun = json.loads(store.get(self._key))
            self._since = {(kind, step): things for kind, step, things in since}
            self.begun = None if begun is None else (begun[0], begun[1])

    def taken(self, kind: Kind, step: int) -> None:
        """Note that a snapshot is taken: a rank that goes back to it writes again what is written from now on.

        The commit after the snapshot of a tail may fail, so the step before keeps its record until a batch begins.
        """
        if (kind, step) == self._back:
            return  # this rank has gone back to this snapshot, so its record stays
        if kind == "batch":
            self._since = {key: things for key, things in self._since.items() if key[1] >= step}
        else:  # a rank that went back to before the commit has written nothing of what comes after it
            self._back = None
            self._written_before.clear()
        self._since[kind, step] = []
        self._anew.add((kind, step))

    def restored(self, kind: Kind, step: int) -> None:
        """Note that this rank goes back to a snapshot, or, as a replacement, takes its predecessor's place there."""
        self._back, self._anew = (kind, step), set()
        self._written_before = Counter(self._since.setdefault((kind, step), []))

    def wait_for_store(self) -> None:
        """Wait until the store answers; see `begin`."""
        self._store.check([self._key])

    def begin(self, thing: str, note: Any) -> None:
        """Note that a thing is about to be written, and wait until the store has that.

        A rank whose node is cut off runs on until its next collective, but what it writes until then would be missing
        in the record, and its replacement would write it again. So it waits here, until it is killed.

        Args:
            thing: What is about to be written.
            note: What a replacement needs if this process is lost meanwhile, as plain data.
        """
        self._store_record((thing, note))
        self.wait_for_store()  # a TCP store's `set` does not wait

    def abandon(self) -> None:
        """Note that nothing is about to be written: what was begun is written again, or has been cut off."""
        self._store_record(None)

    def is_there(self, thing: str) -> bool:
        """Return whether a thing was written before this rank went back, and has not been written again."""
        return self._written_before[thing] > 0

    def add(self, thing: str) -> None:
        """Note that a thing is written, or was there already."""
        again = self.is_there(thing)
        self._written_before[thing] -= again
        for key, things in self._since.items():
            if not again or key in self._anew:
                things.append(thing)  # otherwise the record has it already
        self._store_record(None)

    def _store_record(self, begun: tuple[str, Any] | None) -> None:
        since = [(*key, things) for key, things in self._since.items()]
        self._store.set(self._key, json.dumps([since, begun]))
