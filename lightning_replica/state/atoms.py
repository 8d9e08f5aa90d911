"""Values that cannot change, and when two of them are the same to the last bit."""

import math
from typing import Any, Final

ATOMS: Final = frozenset((type(None), bool, int, float, str, bytes))

_HUGE: Final = 1 << 1000  # Python refuses to write numbers of more than 4300 digits


def is_plain_atom(value: Any) -> bool:
    """Return whether JSON keeps a value of a type in `ATOMS`: not a huge number, nor a text with lone surrogates."""
    if type(value) is int:
        return -_HUGE < value < _HUGE
    if type(value) is not str or value.isascii():
        return True
    return not any("\ud800" <= character <= "\udfff" for character in value)


def is_same_atom(a: Any, b: Any) -> bool:
    """Return whether two values of types in `ATOMS` are the same: 0.0 equals -0.0, but does not divide like it.

    A NaN is the same as itself only.
    """
    if a is b:
        return True
    if type(a) is not type(b) or a != b:
        return False
    return type(a) is not float or math.copysign(1, a) == math.copysign(1, b)
