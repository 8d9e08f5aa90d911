"""What CPython keeps of built-in objects and does not tell, and what is wrong with some of its versions."""

import ctypes
import sys
from typing import Any, Final

FORKS_MAY_HANG: Final = sys.version_info < (3, 10, 15) or (3, 11) <= sys.version_info < (3, 11, 7)
"""Whether a forked process may wait for ever for a lock of another thread: python/cpython#112275."""

# Of a set, behind the head of every object: how many slots are filled, and used, a mask, the table, a hash, a finger.
_FINGER: Final = object.__basicsize__ + 5 * ctypes.sizeof(ctypes.c_ssize_t)


def place_of_next(value: set[Any]) -> int:
    """Return where `set.pop` goes on in the table of a set; 0 if it has taken no member yet."""
    return _finger(value) if _IS_KNOWN else 0


def _finger(value: set[Any]) -> int:
    return ctypes.c_ssize_t.from_address(id(value) + _FINGER).value


def _is_known() -> bool:
    """Return whether this Python has a set's finger where it is looked for."""
    if set.__basicsize__ < _FINGER + ctypes.sizeof(ctypes.c_ssize_t):
        return False
    new = {1, 2, 3}
    before = _finger(new)
    popped = [new.pop(), new.pop()]
    return before == 0 and _finger(new) == popped[-1] + 1


_IS_KNOWN: Final = _is_known()
