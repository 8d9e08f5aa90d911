"""Doubles of what the package has: one that stands in for what is not there any more is an error."""

from collections.abc import Callable, Collection
from typing import Any, TypeVar

C = TypeVar("C", bound=type)


def overriding(*, new: Collection[str] = ()) -> Callable[[C], C]:
    """Says of a class that its body defines only what a base class has, and names that are ``new``.

    When the original's method gets another name, nobody calls the double's any more, and a test would pass without it.

    Raises:
        TypeError: When the class is made, if it is not so. Names such as ``__init__`` are not looked at.
    """

    def check(double: C) -> C:
        names = {name for name in vars(double) if not (name.startswith("__") and name.endswith("__"))}
        known = {name for base in double.__mro__[1:] for name in vars(base)}
        if lost := sorted(names - known - {*new}):
            bases = " and ".join(base.__qualname__ for base in double.__bases__)
            raise TypeError(f"{double.__qualname__} overrides {', '.join(lost)}, which {bases} does not have")
        return double

    return check


def put(owner: Any, name: str, double: object) -> None:
    """Puts a double in the place of an attribute that is there, in a process that ends with its test."""
    getattr(owner, name)
    setattr(owner, name, double)
