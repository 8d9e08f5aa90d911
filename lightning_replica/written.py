"""What has been written since each snapshot: a rank that goes back to one writes it again, and must know.

A rank keeps this for itself, and leaves it in the store for the process that may have to take its place.
"""

import json
from collections import Counter

from lightning_replica.recovery.generation import Store
from lightning_replica.recovery.interface import Kind


class Written:
    """Things of one kind that are written, each told by a text.

    Args:
        store: Where a replacement finds it.
        key: Under which name.
        newborn: Whether this process is a replacement, and begins with what its predecessor has written.
    """

    def __init__(self, store: Store, key: str, newborn: bool) -> None:
        self._store, self._key = store, key
        self._since: dict[tuple[Kind, int], list[str]] = {}
        self._there: Counter[str] = Counter()  # what was written already, and will be again
        self._back: tuple[Kind, int] | None = None  # where this rank has gone back to, and is doing again
        self._anew: set[tuple[Kind, int]] = set()  # snapshots taken since then
        if newborn and store.check([key]):
            for kind, step, things in json.loads(store.get(key)):
                self._since[kind, step] = things

    def taken(self, kind: Kind, step: int) -> None:
        """A snapshot is taken: what is written from now on is written again by a rank that goes back to it.

        The commit that follows the one of a tail may fail, so those of the step before are kept until a batch begins.
        """
        if (kind, step) == self._back:
            return  # the one that this rank has gone back to
        if kind == "batch":
            self._since = {key: things for key, things in self._since.items() if key[1] >= step}
        else:  # what comes after the commit nobody has written who has gone back to before it
            self._back = None
            self._there.clear()
        self._since[kind, step] = []
        self._anew.add((kind, step))

    def restored(self, kind: Kind, step: int) -> None:
        """This rank goes back to a snapshot, or, as a replacement, takes its predecessor's place there."""
        self._back, self._anew = (kind, step), set()
        self._there = Counter(self._since.setdefault((kind, step), []))

    def is_there(self, thing: str) -> bool:
        """Whether it was written before this rank went back, and has not been written again."""
        return self._there[thing] > 0

    def add(self, thing: str) -> None:
        """It is written, or was there already."""
        again = self.is_there(thing)
        self._there[thing] -= again
        for key, things in self._since.items():
            if not again or key in self._anew:
                things.append(thing)  # else it stands there
        self._store.set(self._key, json.dumps([(*key, things) for key, things in self._since.items()]))
