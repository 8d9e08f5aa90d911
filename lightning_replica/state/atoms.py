"""Values that cannot change, and when two of them are the same to the last bit."""

import math
from typing import Any, Final

ATOMS: Final = frozenset((type(None), bool, int, float, str, bytes))


def is_same_atom(a: Any, b: Any) -> bool:
    """Return whether two values of types in `ATOMS` are the same: 0.0 equals -0.0, but does not divide like it.

    A NaN is the same as itself only.
    """
    if a is b:
        return True
    if type(a) is not type(b) or a != b:
        return False
    return type(a) is not float or math.copysign(1, a) == math.copysign(1, b)
