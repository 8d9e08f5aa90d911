"""The journal of set-up collectives.

A replacement runs the user's script from the top, and on its way to the fit loop meets Lightning's set-up
collectives, which nobody else calls any more. So every rank writes down what each of its own gave, and its
replacement reads it. Entries are found by the name of the last barrier and a number behind it, not by a running
number alone: a replacement runs no sanity validation, and what the others met there must not shift the rest.
"""

from collections import Counter
from collections.abc import Callable
from typing import Any

from lightning_replica import plain
from lightning_replica.errors import RecoveryError
from lightning_replica.recovery.generation import Store


class Journal:
    """Writes down, or reads back, the results of this rank's set-up collectives.

    Args:
        store: The supervisor's store.
        rank: This rank.
        reading: Whether this is a replacement, which reads.
    """

    def __init__(self, store: Store, rank: int, reading: bool) -> None:
        self._store, self._rank = store, rank
        self.reading = reading
        self._open = True
        self._label = "start"
        self._counts: Counter[str] = Counter()

    def mark(self, label: str) -> None:
        """Begins a new section: the entries that follow are numbered from its ``label`` on."""
        self._label = label
        self._counts[label] = 0

    def close(self) -> None:
        """Ends the journal: set-up is over, collectives are what they seem again."""
        self._open = self.reading = False

    def entry(self, collective: Callable[[], Any]) -> Any:
        """The result of ``collective``: called and written down, or read back."""
        if not self._open:
            return collective()
        number = self._counts[self._label]
        self._counts[self._label] += 1
        key = f"journal/{self._rank}/{self._label}/{number}"
        if self.reading:
            return self._read(key)
        result = collective()
        self._store.set(key, plain.save(result))
        return result

    def _read(self, key: str) -> Any:
        if not self._store.check([key]):
            raise RecoveryError(
                f"This replacement of rank {self._rank} met a set-up collective that its predecessor did not ({key})."
                " The script must do the same on every start until `fit` begins."
            )
        return plain.load(self._store.get(key))
