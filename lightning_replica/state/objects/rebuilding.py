"""Objects whose content lies in C, as a table of pandas or a tree of SciPy: taken apart, compared, made again.

Their attributes say nothing, or not all. Most of them give what they hold to pickle, as a function, its arguments and a
state (`object.__reduce_ex__`). Here nothing is pickled: what an object gives are objects of this process, which the
walk follows like any other; and the function is called only where the object has changed.
"""

import copyreg
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Final, NamedTuple

import numpy as np
from torch import Tensor

from lightning_replica.state.atoms import ATOMS, is_same_atom
from lightning_replica.state.objects.contents import is_content, plain_of, same_content

_PROTOCOL: Final = 4
_LARGE_BYTES: Final = 4096  # texts and bytes that an object makes anew each time it is asked, twice a step
_DEEP: Final = 8  # containers in containers
_LONG: Final = 40  # characters of a key in a name
_CONTAINERS: Final = (tuple, list, dict)


class Parts(NamedTuple):
    """What an object in C consists of.

    Attributes:
        function: What makes the object: its class, or a function.
        arguments: What the function takes.
        state: What the object is given afterwards; None for nothing.
    """

    function: Callable[..., Any]
    arguments: tuple[Any, ...]
    state: Any


def parts_of(value: Any) -> Parts | None:
    """Return what an object consists of; None if it does not say, or makes much of it anew each time it is asked."""
    parts = _asked(value)
    if parts is None or sum(map(_size, parts)) > _LARGE_BYTES:
        return None
    again = _asked(value)
    return parts if again is not None and are_alike(parts, again) else None


def move_back(value: Any, parts: Parts) -> bool:
    """Put a block of pandas to the columns where it was. Return whether it consists of ``parts`` then.

    A block that is made again would not know which other tables show its memory, and so write to these, too.
    """
    if getattr(parts.function, "__name__", "") != "_unpickle_block" or not hasattr(value, "mgr_locs"):
        return False
    values, place, _ = parts.arguments
    if value.values is not values:
        return False
    value.mgr_locs = type(value.mgr_locs)(place)
    return has_parts(value, parts)


def _asked(value: Any) -> Parts | None:
    try:
        given = copyreg.dispatch_table.get(type(value))
        found = value.__reduce_ex__(_PROTOCOL) if given is None else given(value)
    except Exception:  # it refuses, or its class runs code of its own
        return None
    if not isinstance(found, tuple) or len(found) < 2 or any(each is not None for each in found[3:]):
        return None
    return Parts(found[0], found[1], found[2] if len(found) > 2 else None)


def has_parts(value: Any, parts: Parts) -> bool:
    """Return whether an object consists of ``parts``."""
    now = _asked(value)
    return now is not None and are_alike(now, parts)


def are_alike(a: Any, b: Any, depth: int = 0) -> bool:
    """Return whether two parts are the same object, or hold the same: containers are new each time."""
    if a is b:
        return True
    if type(a) is not type(b) and not (isinstance(a, tuple) and isinstance(b, tuple)):
        return False
    if type(a) in ATOMS:
        return is_same_atom(a, b)
    if depth > _DEEP:
        return False
    if isinstance(a, tuple) or type(a) is list:
        return len(a) == len(b) and all(are_alike(one, other, depth + 1) for one, other in zip(a, b, strict=True))
    if type(a) is dict:
        return list(a) == list(b) and all(are_alike(a[key], b[key], depth + 1) for key in a)
    if isinstance(a, (Tensor, np.ndarray)):
        return is_content(a) and is_content(b) and same_content(plain_of(a), plain_of(b))
    return isinstance(a, (slice, range, np.dtype)) and bool(a == b)


def _size(part: Any, depth: int = 0) -> int:
    """Return how many bytes of texts and of bytes there are in containers."""
    if isinstance(part, (str, bytes)):
        return len(part)
    if type(part) not in _CONTAINERS or depth > _DEEP:
        return 8
    return sum(_size(each, depth + 1) for each in (part.values() if isinstance(part, dict) else part))


def leaves_of(parts: Parts) -> Iterator[tuple[str, Any]]:
    """Yield what is in the arguments and in the state, without containers that are new each time, with names."""
    for place, argument in enumerate(parts.arguments):
        yield from _leaves(argument, f"<{place}>", 0)
    yield from _leaves(parts.state, "", 0)


def _leaves(part: Any, name: str, depth: int) -> Iterator[tuple[str, Any]]:
    if type(part) not in _CONTAINERS or depth > _DEEP:
        yield name, part
        return
    named = part.items() if isinstance(part, dict) else enumerate(part)
    for key, each in named:
        yield from _leaves(each, f"{name}.{key}" if isinstance(key, str) else f"{name}[{short(key)}]", depth + 1)


def with_leaves(part: Any, stands: Callable[[Any], Any], depth: int = 0) -> Any:
    """Return a part with what stands for each of its leaves."""
    if type(part) not in _CONTAINERS or depth > _DEEP:
        return stands(part)
    if isinstance(part, dict):
        return {key: with_leaves(each, stands, depth + 1) for key, each in part.items()}
    made = [with_leaves(each, stands, depth + 1) for each in part]
    return tuple(made) if isinstance(part, tuple) else made


def rebuilt(function: Callable[..., Any], arguments: Sequence[Any], state: Any) -> Any:
    """Return an object that consists of these parts."""
    made = function(*arguments)
    if state is None:
        return made
    if hasattr(made, "__setstate__"):
        made.__setstate__(state)
        return made
    attributes, slots = state if isinstance(state, tuple) and len(state) == 2 else (state, None)
    vars(made).update(attributes or {})
    for name, each in (slots or {}).items():
        setattr(made, name, each)
    return made


def label(place: int, key: Any) -> str:
    """Return a name for an entry of a dict that no other entry has, and that other processes give to it, too.

    Objects are named after their place: their text may contain an address, or be that of another one.
    """
    text = short(key)
    if not all(type(each) in ATOMS for each in (key if type(key) is tuple else (key,))):
        return f"a {type(key).__name__} #{place}"
    return text if len(text) < _LONG else f"{text} #{place}"


def short(key: Any) -> str:
    """Return a key of the user's as text, for names."""
    try:
        text = repr(key)
    except Exception:  # of the user's class
        text = f"a {type(key).__name__}"
    return text if len(text) <= _LONG else f"{text[: _LONG - 3]}..."
