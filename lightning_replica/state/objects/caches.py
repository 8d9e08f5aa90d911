"""What a function has cached that `functools.lru_cache` wraps: read, and put back.

A generator that a function makes once, or a noise that it draws once for a size, is state of the training as a global
variable is. Python shows how many calls are cached, and not which. The garbage collector does: it asks the wrapper what
it refers to, and the wrapper names its entries and the dict in which it looks them up. An entry of a cache without a
limit is an item of this dict. Those of others are links in a list, which only a call makes. So the function is called
while its code is another one, that returns what is to be cached.
"""

import functools
import gc
import threading
import types
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Final, TypeAlias

from lightning_replica.core.user_code import CACHE, is_users

Key: TypeAlias = Any
"""Under which a call is cached."""
Entry: TypeAlias = tuple[Key, Any]
"""A key and what the call has returned."""

OF_WRAPPERS: Final = frozenset((*functools.WRAPPER_ASSIGNMENTS, "__wrapped__", "cache_parameters"))
"""Attributes that every such function has."""
# What the wrapper refers to: its class, the links, the dict, the function, the mark that divides positional arguments
# from keywords, two classes, and its attributes.
_BEFORE, _AFTER = 1, 6
_OF_LINK: Final = 3  # the key, the result, and the class of the link


@dataclass(frozen=True)
class Call:
    """A call that is cached.

    Attributes:
        arguments: Its positional arguments.
        keywords: Its keyword arguments.
    """

    arguments: tuple[Any, ...]
    keywords: Mapping[str, Any] = field(default_factory=dict)


class Cache:
    """The entries of a function that `functools.lru_cache` wraps.

    Args:
        function: The function.

    Raises:
        TypeError: If this version of Python keeps them in another way.
    """

    def __init__(self, function: Any) -> None:
        self._function = function
        self.limit: int | None = function.cache_info().maxsize
        parameters = function.cache_parameters()  # those of the function below if there is a cache in a cache
        self._typed: bool = parameters["typed"] and parameters["maxsize"] == self.limit
        referents = gc.get_referents(function)
        self._links = referents[_BEFORE:-_AFTER]
        self._lookup, self._wrapped, self._mark, *_, last = referents[-_AFTER:]
        fits = referents[0] is CACHE and type(self._lookup) is dict and callable(self._wrapped)
        if not fits or last is not vars(function) or type(self._mark) is not object or len(self._links) % _OF_LINK:
            raise TypeError("this version of Python keeps its entries in a way that is not known")

    def entries(self) -> list[Entry]:
        """Return what is cached; of a cache with a limit, what it forgets first comes first."""
        if self.limit is None:
            return list(self._lookup.items())
        return list(zip(self._links[::_OF_LINK], self._links[1::_OF_LINK], strict=True))

    def call_of(self, key: Key) -> Call:
        """Return the call that is cached under a key."""
        if type(key) in (int, str):
            return Call((key,))
        place = next((n for n, part in enumerate(key) if part is self._mark), None)
        if place is None:
            return Call(key[: len(key) // 2] if self._typed else key)
        # With the types of arguments, there is one more for each of these and of the keywords.
        count = (len(key) - 1 - 2 * place) // 3 if self._typed else (len(key) - 1 - place) // 2
        named = key[place + 1 : place + 1 + 2 * count]
        return Call(key[:place], dict(zip(named[::2], named[1::2], strict=True)))

    def key_of(self, call: Call) -> Key:
        """Return the key under which a call is cached."""
        arguments, named = call.arguments, [part for item in call.keywords.items() for part in item]
        if not self._typed and not named and len(arguments) == 1 and type(arguments[0]) in (int, str):
            return arguments[0]
        types_ = (*map(type, arguments), *map(type, call.keywords.values())) if self._typed else ()
        return (*arguments, *((self._mark, *named) if named else ()), *types_)

    def put_back(self, entries: list[Entry]) -> None:
        """Make it hold entries, and no others.

        Raises:
            ValueError: If one of them is not cached, the cache has a limit, and what it calls is not written in Python.
        """
        if self.limit is None:
            now = dict(entries)  # first: to compare keys may run code of the user's
            self._lookup.clear()
            self._lookup.update(now)
            return
        function = getattr(self._wrapped, "__func__", self._wrapped)
        if not isinstance(function, types.FunctionType):
            self._remove_others(entries)
            return
        self._function.cache_clear()
        for key, result in entries:
            call = self.call_of(key)
            with _returning(function, result):
                self._function(*call.arguments, **call.keywords)

    def _remove_others(self, entries: list[Entry]) -> None:
        """Remove entries as another thread could. The link that is left of one is passed over when its turn comes."""
        then, now = dict(entries), dict(self.entries())
        for key in now.keys() - then.keys():
            self._lookup.pop(key, None)
        if any(key not in now or now[key] is not result for key, result in entries):
            raise ValueError(
                "what it has forgotten cannot be cached again, as it has a limit and is not written in Python"
            )


def entries_of(function: Any) -> list[Entry]:
    """Return what a function has cached; nothing of one in a library, as those of Python that make types."""
    return [] if _is_of_a_library(function) else Cache(function).entries()


def _is_of_a_library(function: Any) -> bool:
    while type(function) is CACHE:
        function = vars(function).get("__wrapped__")
    function = getattr(function, "__func__", function)
    return isinstance(function, types.FunctionType) and not is_users(function.__code__.co_filename)


def _stub() -> types.CodeType:
    """Return the code of a function that calls one of its constants, ``""``, with its arguments."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", SyntaxWarning)  # a text cannot be called
        made = eval("lambda *arguments, **keywords: ''(arguments, keywords)")
    code: types.CodeType = made.__code__
    return code


_STUB: Final = _stub()


@contextmanager
def _returning(function: types.FunctionType, result: Any) -> Iterator[None]:
    """Make a function return ``result``. Other threads get what it returns otherwise."""
    code, thread = function.__code__, threading.get_ident()
    same = types.FunctionType(code, function.__globals__, None, function.__defaults__, function.__closure__)
    same.__kwdefaults__ = function.__kwdefaults__

    def answer(arguments: tuple[Any, ...], keywords: dict[str, Any]) -> Any:
        return result if threading.get_ident() == thread else same(*arguments, **keywords)

    constants = tuple(answer if constant == "" else constant for constant in _STUB.co_consts)
    function.__code__ = _STUB.replace(co_consts=constants, co_freevars=code.co_freevars)
    try:
        yield
    finally:
        function.__code__ = code
