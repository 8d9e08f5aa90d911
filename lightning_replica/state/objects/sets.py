"""Makes a set hold what another one holds, so that code sees the members in the same order.

CPython keeps members in a table. Where one stands depends on its hash, on the length of the table, and on who stood
there when it came. A table that has grown does not become shorter when members leave.
"""

import itertools
import operator
import os
from collections.abc import Iterable, Iterator
from typing import Any, Final

_TRIES: Final = 32  # orders in which a set is filled
_EMPTY: Final = set().__sizeof__()  # with a table of 8 places
_BYTES_OF_A_PLACE: Final = (set(range(5)).__sizeof__() - _EMPTY) // 32  # a set of 5 has 32 places


def length_of_table(value: set[Any]) -> int:
    """Return how many bytes the table of a set takes beyond the shortest one."""
    return set.__sizeof__(value) - _EMPTY


def refill(made: set[Any], members: list[Any], length: int, pops: bool) -> str:
    """Make a set hold ``members``. Return what is wrong with their order then; "" if nothing is.

    The order of objects differs from run to run, and that of texts, too, unless ``PYTHONHASHSEED`` is set. Then no
    training depends on it.

    Args:
        made: The set.
        members: What it will hold, in the order of before.
        length: What `length_of_table` returned then.
        pops: Whether members were taken by `set.pop`, which goes on from where it was.
    """
    kept = (bool, int, float, *((str, bytes) if os.environ.get("PYTHONHASHSEED", "random") != "random" else ()))
    if not _are_all(kept, members):
        set.clear(made)
        set.update(made, members)
        return ""
    for each in itertools.islice(_orders(members), _TRIES):
        for fillers in ((), _fillers(members, length)):
            set.clear(made)
            _grow(made, fillers, length)
            set.update(made, each)
            if all(map(operator.is_, set.__iter__(made), members)):
                return "its `pop` takes the members in another order from now on" if pops else ""
    return "its members have another order from now on"


def _are_all(classes: tuple[type, ...], members: Iterable[Any]) -> bool:
    return all(
        _are_all(classes, each) if isinstance(each, (tuple, frozenset)) else isinstance(each, classes)
        for each in members
    )


def _orders(members: list[Any]) -> Iterator[list[Any]]:
    """Yield orders in which members of the same hash may have come."""
    yield members
    yield members[::-1]
    yield from (members[place:] + members[:place] for place in range(1, len(members)))


def _fillers(members: list[Any], length: int) -> Iterator[int]:
    """Yield numbers that stand where no member belongs in a table of that length."""
    places = max(8, length // _BYTES_OF_A_PLACE)
    taken = {hash(member) % places for member in members}
    return (number for number in itertools.count(places) if number % places not in taken)


def _grow(made: set[Any], fillers: Iterable[int], length: int) -> None:
    """Make the table of an empty set longer by numbers that leave again."""
    added = []
    for number in fillers:
        if length_of_table(made) >= length:
            break
        set.add(made, number)
        added.append(number)
    for number in added:
        set.discard(made, number)
