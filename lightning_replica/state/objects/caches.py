"""What a function has cached that `functools.lru_cache` wraps: read, and put back.

A generator that a function makes once, or a noise that it draws once for a size, is state of the training as a global
variable is. Python shows how many calls are cached, and not which. The garbage collector does: it asks the wrapper what
it refers to, and the wrapper names its entries and the dict in which it looks them up. An entry of a cache without a
limit is an item of this dict. Those of others are links in a list, which only a call can make.
"""

import functools
import gc
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Final, TypeAlias

Key: TypeAlias = Any
"""Under which a call is cached."""

CACHE: Final[Any] = type(functools.lru_cache(len))
# What the wrapper refers to: its class, the links, the dict, the function, the mark that divides positional arguments
# from keywords, two classes, and its attributes.
_BEFORE, _AFTER = 1, 6
_OF_LINK: Final = 3  # the key, the result, and the class of the link
_FOREIGN: Final = ("lightning_replica", "torch.", "lightning.", "pytorch_lightning.")


@dataclass(frozen=True, repr=False)
class Call:
    """A call that is cached.

    Attributes:
        arguments: Its positional arguments.
        keywords: Its keyword arguments.
    """

    arguments: tuple[Any, ...]
    keywords: Mapping[str, Any] = field(default_factory=dict)

    def parts(self) -> Iterator[tuple[str, Any]]:
        """Yield the arguments, each with a name."""
        yield from ((f"[{place}]", each) for place, each in enumerate(self.arguments))
        yield from self.keywords.items()

    def __repr__(self) -> str:
        named = (f"{name}={value!r}" for name, value in self.keywords.items())
        return f"({', '.join((*map(repr, self.arguments), *named))})"


class Cache:
    """The entries of a function that `functools.lru_cache` wraps.

    Args:
        function: The function.

    Raises:
        TypeError: If this version of Python keeps them in another way.
    """

    def __init__(self, function: Any) -> None:
        self._function = function
        parameters = function.cache_parameters()
        self.limit: int | None = parameters["maxsize"]
        self._typed: bool = parameters["typed"]
        referents = gc.get_referents(function)
        attributes = vars(function)
        self._links = referents[_BEFORE:-_AFTER]
        lookup, wrapped, self._mark, *_, last = referents[-_AFTER:]
        fits = referents[0] is CACHE and type(lookup) is dict and callable(wrapped) and last is attributes
        if not fits or type(self._mark) is not object or len(self._links) % _OF_LINK:
            raise TypeError("this version of Python keeps its entries in a way that is not known")
        self._lookup: dict[Key, Any] = lookup

    def results(self) -> dict[Key, Any]:
        """Return what calls have returned, in the order in which they were made."""
        if self.limit is None:
            return dict(self._lookup)
        # Of a link that another one has replaced, the key may be there twice: the later counts.
        by_key = dict(zip(self._links[::_OF_LINK], self._links[1::_OF_LINK], strict=True))
        return {key: by_key[key] for key in self._lookup}

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
        types = (*map(type, arguments), *map(type, call.keywords.values())) if self._typed else ()
        return (*arguments, *((self._mark, *named) if named else ()), *types)

    def put_back(self, then: Mapping[Key, Any]) -> list[Key]:
        """Make it hold the results of a former time. Return the keys of those that it cannot hold again.

        Calls that have come since are removed; the link that is left of one is passed over, as if another thread had
        removed it. A cache with a limit forgets calls as it likes, so none matters that it has forgotten when full.
        """
        now = self.results()
        if self.limit is None:
            self._lookup.clear()
            self._lookup.update(then)
            return []
        for key in now.keys() - then.keys():
            del self._lookup[key]
        was_full = len(then) == self.limit
        return [key for key in then if (now[key] is not then[key] if key in now else not was_full)]

    def call(self, call: Call) -> Any:
        """Call the function, which caches the result, and return it."""
        return self._function(*call.arguments, **call.keywords)


def results_of(function: Any) -> dict[Key, Any]:
    """Return what a function has cached; nothing of one of torch's, Lightning's or this package's."""
    is_foreign = str(getattr(function, "__module__", "")).startswith(_FOREIGN)
    return {} if is_foreign else Cache(function).results()
