"""What one reachable object held when a snapshot was taken: how it is compared and put back, in place.

A record holds references to what its object refers to, and no copies: these objects have records of their own. So who
refers to what is the same after a restoration, whatever it is.
"""

import copy
import ctypes
import functools
import gc
import inspect
import itertools
import operator
import threading
import types
from collections import OrderedDict, defaultdict, deque
from collections.abc import Callable, Iterable, Mapping, Sequence, Set
from contextvars import ContextVar
from typing import Any, Final, TypeAlias

from torch import Tensor, nn

from lightning_replica._compat import torch_jit
from lightning_replica._compat.cpython import place_of_next
from lightning_replica._compat.torch import data_version
from lightning_replica.state.atoms import ATOMS, is_same_atom
from lightning_replica.state.objects.caches import OF_WRAPPERS, Cache, Call, entries_of
from lightning_replica.state.objects.contents import copy_of, with_class_of
from lightning_replica.state.objects.kinds import (
    BOUND_TO,
    IN_C,
    VIEWS,
    Kind,
    closure_of,
    has_attributes,
    is_file,
    is_harmless,
    iterator_of,
    pickled_digest,
    probe,
    reduced,
    slots_of,
)
from lightning_replica.state.objects.randomness import bits_of, random_state, same_random_state, set_random
from lightning_replica.state.objects.rebuilding import (
    Parts,
    are_alike,
    has_parts,
    label,
    leaves_of,
    move_back,
    parts_of,
    rebuilt,
    short,
    with_leaves,
)
from lightning_replica.state.objects.sets import length_of_table, refill

Stands: TypeAlias = Callable[[Any], Any]
"""Returns what stands for a value now: the value itself, or what was made in its place."""

MISSING: Final = object()
"""What stands where nothing is."""
# Of a tensor, as if they were among its attributes.
GRADIENT: Final = "grad"
REQUIRES_GRAD: Final = "requires_grad"
_BASES = (list, tuple, deque, set, frozenset, OrderedDict, dict)
_OF_SLOTS: Final = (types.MemberDescriptorType, types.GetSetDescriptorType)


class Record:
    """What an object held; see the top of the file.

    Attributes:
        value: The object.
        name: How the user would call it, as ``module.rnn.history[3]``.
        key: Under which `Recorder` knows it.
    """

    __slots__ = ("key", "name", "value")
    key: int

    def __init__(self, value: Any, name: str) -> None:
        self.value, self.name = value, name

    def children(self) -> Iterable[tuple[str, Any]]:
        """Yield what the object refers to, each with what is added to the name."""
        return ()

    def leading(self, known: Set[int]) -> Iterable[tuple[str, Any]]:
        """Yield the children without those with an ``id`` in ``known``, and most of those that lead to nothing."""
        return ((name, child) for name, child in self.children() if id(child) not in known and leads_on(child))

    def referred(self) -> Iterable[Any]:
        """Return the children without names."""
        return [child for _, child in self.children()]

    def is_same(self) -> bool:
        """Return whether the object is as it was."""
        raise NotImplementedError

    def added_to(self, before: "Record") -> Sequence[tuple[str, Any]] | None:
        """Return what an object leads to now and did not before; None if all of it has to be looked at."""
        return None

    def put_back(self, stands: Stands) -> None:
        """Make the object as it was."""
        raise NotImplementedError

    def length_now(self) -> int:
        """Return how many items the object has now; of a container."""
        return len(self.value)

    def renewed(self) -> "Record":
        """Return a record of the same object as it is now."""
        return type(self)(self.value, self.name)


_OF_PYTHON: Final = frozenset(
    (
        *("__module__", "__qualname__", "__doc__", "__dict__", "__weakref__", "__slots__", "__hash__", "__bases__"),
        *(
            "__annotations__",
            "__annotate__",
            "__annotate_func__",
            "__annotations_cache__",
            "__conditional_annotations__",
        ),
        *("__orig_bases__", "__parameters__", "__type_params__", "__abstractmethods__", "__firstlineno__"),
        *("__static_attributes__", "__match_args__", "__dataclass_fields__", "__dataclass_params__", "__classcell__"),
        *("__class_getitem__", "__protocol_attrs__", "__non_callable_proto_members__", "__attrs_attrs__"),
    )
)


class Attributes(Record):
    """The attributes of an object.

    Args:
        value: The object; a module of Python or a class has attributes, too.
        name: Its name.
        own: Names of attributes that other code restores, or that do not belong to the user.
        only: Names of the only attributes that count; None for all.
    """

    __slots__ = ("_all_count", "_cls", "names", "only", "own", "values")

    def __init__(
        self, value: Any, name: str, own: frozenset[str] = frozenset(), only: Sequence[str] | None = None
    ) -> None:
        super().__init__(value, name)
        self.own, self.only, self._cls = own, only, type(value)
        now = attributes_of(value)
        self.names = self._names_in(now)
        self.values = [now[each] for each in self.names]
        self._all_count = not own and only is None and not isinstance(value, type)

    def _names_in(self, now: Mapping[str, Any]) -> list[str]:
        if self.only is not None:
            return [each for each in self.only if each in now]
        if isinstance(self.value, type):
            return [each for each in now if each not in self.own and not is_special(each)]
        return [each for each in now if each not in self.own] if self.own else [*now]

    def children(self) -> Iterable[tuple[str, Any]]:
        return ((f".{name}", value) for name, value in zip(self.names, self.values, strict=True))

    def is_same(self) -> bool:
        if type(self.value) is not self._cls:
            return False
        now = attributes_of(self.value)
        if self._all_count:  # most objects: there are many
            return [*now] == self.names and all(map(operator.is_, now.values(), self.values))
        names = self._names_in(now)
        return names == self.names and all(map(operator.is_, map(now.__getitem__, names), self.values))

    def give(self, made: Any, stands: Stands) -> None:
        """Give the attributes to what was made in the place of the object."""
        vars(made).update({name: stands(value) for name, value in zip(self.names, self.values, strict=True)})

    def put_back(self, stands: Stands) -> None:
        if type(self.value) is not self._cls:
            self.value.__class__ = self._cls
        now = attributes_of(self.value)
        names = self._names_in(now)
        registered = {name for name in self.names if is_registered(self.value, name)}
        files = {name: now[name] for name in names if is_file(now[name])}
        if names != self.names:
            # Other threads may read variables of modules and classes meanwhile; the order of these does not matter.
            shared = isinstance(self.value, (types.ModuleType, type))
            for name in set(names) - set(self.names) if shared else names:
                delete_attribute(self.value, name)
        now = attributes_of(self.value)
        for name, value in zip(self.names, self.values, strict=True):
            stand = files[name] if name in files and is_file(value) else stands(value)
            if now.get(name, MISSING) is not stand and name not in registered:
                set_attribute(self.value, name, stand)

    def has_scope_of(self, other: "Attributes") -> bool:
        """Return whether the same names count as in another record."""
        return (self.own, self.only) == (other.own, other.only)

    def renewed(self) -> "Attributes":
        return Attributes(self.value, self.name, self.own, self.only)


def attributes_of(value: Any) -> Mapping[str, Any]:
    """Return the attributes of an object; a leaf of autograd's graphs may have a gradient, besides."""
    if isinstance(value, Tensor) and value.is_leaf:
        gradient = {} if value.grad is None else {GRADIENT: value.grad}
        return {**vars(value), REQUIRES_GRAD: value.requires_grad, **gradient}
    found: Mapping[str, Any] = vars(value)
    return found


def set_attribute(owner: Any, name: str, value: Any) -> None:
    """Set an attribute, without calling code of the object's class."""
    if isinstance(owner, type):
        _of_metaclass(owner, "__setattr__")(owner, name, value)
    elif isinstance(owner, Tensor) and name in (GRADIENT, REQUIRES_GRAD):
        if not owner.is_leaf:  # it has become a part of a graph, in place
            owner.detach_()
        setattr(owner, name, value)
    else:
        vars(owner)[name] = value


def _of_metaclass(owner: type, method: str) -> Any:
    """Return what changes a class: `type`'s method, or that of a metaclass in C, which refuses `type`'s."""
    metaclass: Any = type(owner)
    return getattr(type if isinstance(getattr(metaclass, method), types.FunctionType) else metaclass, method)


def is_special(name: str) -> bool:
    """Return whether Python itself sets an attribute of a class."""
    return name in _OF_PYTHON or name.startswith("_abc_")


def delete_attribute(owner: Any, name: str) -> None:
    """Delete an attribute, without calling code of the object's class."""
    if isinstance(owner, type):
        _of_metaclass(owner, "__delattr__")(owner, name)
    elif isinstance(owner, Tensor) and name in (GRADIENT, REQUIRES_GRAD):
        owner.grad = None  # that it requires one is set, never deleted
    else:
        del vars(owner)[name]


class Slots(Record):
    """The slots of an object."""

    __slots__ = ("values",)

    def __init__(self, value: Any, name: str) -> None:
        super().__init__(value, name)
        self.values = slot_values(value)

    def children(self) -> Iterable[tuple[str, Any]]:
        named = zip(slots_of(type(self.value)), self.values, strict=True)
        return ((f".{name}", value) for name, value in named if value is not MISSING)

    def is_same(self) -> bool:
        return all(map(operator.is_, slot_values(self.value), self.values))

    def put_back(self, stands: Stands) -> None:
        for slot, value in zip(_slots_in(type(self.value)), self.values, strict=True):
            now, then = _held_in(slot, self.value), value if value is MISSING else stands(value)
            if now is then:
                continue
            if then is MISSING:
                slot.__delete__(self.value)
            else:
                slot.__set__(self.value, then)  # a frozen dataclass has no other way

    def give(self, made: Any, stands: Stands) -> None:
        """Give what is in the slots to what was made in the place of the object."""
        for slot, value in zip(_slots_in(type(made)), self.values, strict=True):
            if value is not MISSING:
                slot.__set__(made, stands(value))


class AttributesAndSlots(Slots):
    """Both, of an object that has its content in C."""

    __slots__ = ("attributes",)

    def __init__(self, value: Any, name: str) -> None:
        super().__init__(value, name)
        self.attributes = Attributes(value, name)

    def children(self) -> Iterable[tuple[str, Any]]:
        yield from self.attributes.children()
        yield from super().children()

    def give(self, made: Any, stands: Stands) -> None:
        self.attributes.give(made, stands)
        super().give(made, stands)

    def is_same(self) -> bool:
        return self.attributes.is_same() and super().is_same()

    def put_back(self, stands: Stands) -> None:
        self.attributes.put_back(stands)
        super().put_back(stands)


def beside_content(value: Any, name: str) -> Record | None:
    """Return a record of what an object has beside its content; None if its class gives it nothing."""
    has_slots = bool(slots_of(type(value)))
    if has_attributes(value):
        return AttributesAndSlots(value, name) if has_slots else Attributes(value, name)
    return Slots(value, name) if has_slots else None


def slot_of(value: Any, name: str) -> Any:
    """Return the descriptor of a slot of an object; None if its class has no such slot."""
    cls = type(value)
    return _slots_in(cls)[slots_of(cls).index(name)] if name in slots_of(cls) else None


def slot_values(value: Any) -> list[Any]:
    """Return what is in the slots of an object; `MISSING` where nothing is.

    They are read by their descriptors: of an empty slot, ``getattr`` would ask the user's ``__getattr__``.
    """
    return [_held_in(slot, value) for slot in _slots_in(type(value))]


def _held_in(slot: Any, value: Any) -> Any:
    try:
        return slot.__get__(value)
    except AttributeError:
        return MISSING


_descriptors: dict[type, tuple[Any, ...]] = {}


def _slots_in(cls: type) -> tuple[Any, ...]:
    """Return the descriptors of the slots of a class. A subclass may have something else of that name."""
    if cls not in _descriptors:
        of_names = ([vars(base)[name] for base in cls.__mro__ if name in vars(base)] for name in slots_of(cls))
        found = (next((each for each in of_name if isinstance(each, _OF_SLOTS)), None) for of_name in of_names)
        _descriptors[cls] = tuple(found)
    return _descriptors[cls]


def base_of(value: Any) -> Any:
    """Return the built-in class of a container, whose methods do what the user's class may do otherwise.

    An OrderedDict has an order of its own.
    """
    cls = type(value)
    return cls if cls in _BASES else next((base for base in _BASES if issubclass(cls, base)), cls)


def leads_on(value: Any) -> bool:
    """Return whether a value may lead to something that can change: all do but atoms and tuples of atoms."""
    cls = type(value)
    return cls not in ATOMS and (cls is not tuple or not ATOMS.issuperset(map(type, value)))


def fixed_of(cls: Any, items: list[Any]) -> Any:
    """Return a tuple or a frozenset of a class, without calling code of that class where that is possible."""
    base: Any = tuple if issubclass(cls, tuple) else frozenset
    try:
        return base.__new__(cls, items)
    except TypeError:  # of a class in C, as `time.struct_time`
        return cls(items)


def _begins_with(now: Sequence[Any], before: Sequence[Any]) -> bool:
    return len(now) >= len(before) and all(map(operator.is_, now, before))


class Items(Record):
    """The items of a list or a deque."""

    __slots__ = ("base", "items")

    def __init__(self, value: Any, name: str) -> None:
        super().__init__(value, name)
        self.base = base_of(value)
        self.items = list(self.base.__iter__(value))

    def children(self) -> Iterable[tuple[str, Any]]:
        return ((f"[{place}]", value) for place, value in enumerate(self.items))

    def leading(self, known: Set[int]) -> Iterable[tuple[str, Any]]:
        items = enumerate(self.items)
        return ((f"[{place}]", value) for place, value in items if id(value) not in known and leads_on(value))

    def referred(self) -> Iterable[Any]:
        return self.items

    def added_to(self, before: Record) -> Sequence[tuple[str, Any]] | None:
        if not isinstance(before, Items) or not _begins_with(self.items, before.items):
            return None
        new = enumerate(self.items[len(before.items) :], start=len(before.items))
        return [(f"[{place}]", value) for place, value in new if leads_on(value)]

    def is_same(self) -> bool:
        return self._holds(self.items)

    def _holds(self, items: list[Any]) -> bool:
        value, base = self.value, self.base
        return base.__len__(value) == len(items) and all(map(operator.is_, base.__iter__(value), items))

    def put_back(self, stands: Stands) -> None:
        items = list(map(stands, self.items))
        if self._holds(items):
            return
        if isinstance(self.value, deque):
            deque.clear(self.value)
            deque.extend(self.value, items)
        else:
            list.__setitem__(self.value, slice(None), items)


class Remade(Record):
    """An object that cannot be put back in place: another one stands for it after a restoration."""

    __slots__ = ()

    def made_again(self, stands: Stands) -> Any:
        """Return the object as it was; itself if that is as it was."""
        raise NotImplementedError

    def put_back(self, stands: Stands) -> None:
        """Do nothing: who refers to the object gets what `made_again` returns."""


class Fixed(Remade, Items):
    """The items of a tuple or a frozenset, which only have to be others if one of them is made again."""

    __slots__ = ()

    def is_same(self) -> bool:
        return True

    def made_again(self, stands: Stands) -> Any:
        items = list(map(stands, self.items))
        if all(map(operator.is_, items, self.items)):
            return self.value
        return fixed_of(type(self.value), items)


class View(Remade):
    """The mapping that a view shows, which only has to be another one if the mapping is made again."""

    __slots__ = ("mapping",)

    def __init__(self, value: Any, name: str) -> None:
        super().__init__(value, name)
        self.mapping = mapping_of(value)

    def children(self) -> Iterable[tuple[str, Any]]:
        return ((".mapping", self.mapping),)

    def is_same(self) -> bool:
        return True

    def made_again(self, stands: Stands) -> Any:
        mapping = stands(self.mapping)
        return self.value if mapping is self.mapping else VIEWS[type(self.value)](mapping)


def mapping_of(view: Any) -> Any:
    """Return the mapping that a view shows; only the garbage collector knows the one of a ``MappingProxyType``."""
    return next(iter(gc.get_referents(view)), None)


class Entries(Record):
    """The entries of a dict of any class."""

    __slots__ = ("base", "factory", "items", "keys")

    def __init__(self, value: Any, name: str) -> None:
        super().__init__(value, name)
        self.base, self.factory = base_of(value), self._factory_of(value)
        self.keys, self.items = list(self.base.keys(value)), list(self.base.values(value))

    @staticmethod
    def _factory_of(value: Any) -> Any:
        return value.default_factory if isinstance(value, defaultdict) else None

    def children(self) -> Iterable[tuple[str, Any]]:
        values = ((f"[{label(*key)}]", value) for key, value in zip(enumerate(self.keys), self.items, strict=True))
        return itertools.chain(values, self._key_children(frozenset()), self._factory_child())

    def _factory_child(self) -> Iterable[tuple[str, Any]]:
        return () if self.factory is None else ((".default_factory", self.factory),)

    def _key_children(self, known: Set[int]) -> Iterable[tuple[str, Any]]:
        keys = (each for each in enumerate(self.keys) if type(each[1]) not in ATOMS and id(each[1]) not in known)
        return ((f"[key {label(*each)}]", each[1]) for each in keys)

    def leading(self, known: Set[int]) -> Iterable[tuple[str, Any]]:
        pairs = zip(enumerate(self.keys), self.items, strict=True)
        values = ((f"[{label(*key)}]", value) for key, value in pairs if id(value) not in known and leads_on(value))
        factory = self._factory_child() if id(self.factory) not in known else ()
        return itertools.chain(values, self._key_children(known), factory)

    def added_to(self, before: Record) -> Sequence[tuple[str, Any]] | None:
        if not isinstance(before, Entries) or not _begins_with(self.keys, before.keys):
            return None
        count = len(before.keys)
        if self.factory is not before.factory:
            return None
        if not _begins_with(self.items, before.items) or not all(type(key) in ATOMS for key in self.keys[count:]):
            return None
        new = zip(enumerate(self.keys[count:], count), self.items[count:], strict=True)
        return [(f"[{label(*key)}]", value) for key, value in new if leads_on(value)]

    def referred(self) -> Iterable[Any]:
        return [*self.items, *self.keys, *(child for _, child in self._factory_child())]

    def is_same(self) -> bool:
        value, base = self.value, self.base
        return (
            base.__len__(value) == len(self.keys)
            and self._factory_of(value) is self.factory
            and all(map(operator.is_, base.keys(value), self.keys))
            and all(map(operator.is_, base.values(value), self.items))
        )

    def put_back(self, stands: Stands) -> None:
        if isinstance(self.value, defaultdict):
            self.value.default_factory = stands(self.factory)
        keys, items = list(map(stands, self.keys)), list(map(stands, self.items))
        if self.is_same() and all(map(operator.is_, (*keys, *items), (*self.keys, *self.items))):
            return
        self.base.clear(self.value)
        for key, item in zip(keys, items, strict=True):
            self.base.__setitem__(self.value, key, item)


def _text_of(member: Any) -> str:
    """Return a name for a member of a set, in which there is no address: those are others in each process."""
    text = short(member)
    return f"a {type(member).__name__}" if " at 0x" in text else text


class Members(Record):
    """The members of a set, and in which order they come."""

    __slots__ = ("length", "members", "next")

    def __init__(self, value: Any, name: str) -> None:
        super().__init__(value, name)
        self.members = list(set.__iter__(value))
        self.next, self.length = place_of_next(value), length_of_table(value)

    @property
    def pops(self) -> bool:
        """Whether members were taken by `set.pop`."""
        return self.next != 0

    def children(self) -> Iterable[tuple[str, Any]]:
        return ((f"{{{_text_of(member)}}}", member) for member in self.members if type(member) not in ATOMS)

    def is_same(self) -> bool:
        return self._holds(self.members) and place_of_next(self.value) == self.next

    def _holds(self, members: list[Any]) -> bool:
        return set.__len__(self.value) == len(members) and all(map(operator.is_, set.__iter__(self.value), members))

    def put_back(self, stands: Stands) -> None:
        """Make the set hold the same members.

        Raises:
            ValueError: If code sees another order than before.
        """
        members = list(map(stands, self.members))
        if self._holds(members) and place_of_next(self.value) == self.next:
            return
        if why := refill(self.value, members, self.length, self.pops or place_of_next(self.value) != 0):
            raise ValueError(why)


class Bytes(Record):
    """The bytes of a bytearray or an array of Python's ``array``."""

    __slots__ = ("content",)

    def __init__(self, value: Any, name: str) -> None:
        super().__init__(value, name)
        self.content = copy.copy(value)

    def is_same(self) -> bool:
        return bytes(self.value) == bytes(self.content)

    def put_back(self, stands: Stands) -> None:
        if not self.is_same():
            self.value[:] = self.content


class Memory(Record):
    """The memory of an object of ctypes that holds no addresses."""

    __slots__ = ("content",)

    def __init__(self, value: Any, name: str) -> None:
        super().__init__(value, name)
        self.content = memory_of(value)

    def is_same(self) -> bool:
        return memory_of(self.value) == self.content

    def put_back(self, stands: Stands) -> None:
        fill_memory(self.value, self.content)


def memory_of(value: Any) -> bytes:
    """Return the bytes of an object of ctypes."""
    return ctypes.string_at(ctypes.addressof(value), ctypes.sizeof(value))


def fill_memory(value: Any, content: bytes) -> None:
    """Write into an object of ctypes what `memory_of` has returned."""
    if len(content) == ctypes.sizeof(value):
        ctypes.memmove(ctypes.addressof(value), content, len(content))


class Stream(Record):
    """The content of a stream in memory, and where it stands."""

    __slots__ = ("content",)

    def __init__(self, value: Any, name: str) -> None:
        super().__init__(value, name)
        self.content = self._now()

    def _now(self) -> tuple[Any, int] | None:
        return None if self.value.closed else (self.value.getvalue(), self.value.tell())

    def is_same(self) -> bool:
        return self._now() == self.content

    def put_back(self, stands: Stands) -> None:
        if self.content is not None and not self.is_same():
            fill_stream(self.value, *self.content)


class Randomness(Record):
    """The state of a generator of random numbers."""

    __slots__ = ("state",)

    def __init__(self, value: Any, name: str) -> None:
        super().__init__(value, name)
        self.state = random_state(value)

    def children(self) -> Iterable[tuple[str, Any]]:
        bits = bits_of(self.value)  # other generators may draw from them, too
        return () if bits is None else ((".bit_generator", bits),)

    def is_same(self) -> bool:
        return same_random_state(random_state(self.value), self.state)

    def put_back(self, stands: Stands) -> None:
        set_random(self.value, self.state)


class Iterated(Remade):
    """How far a built-in iterator has come."""

    __slots__ = ("_parts", "arguments", "function", "state")

    def __init__(self, value: Any, name: str) -> None:
        super().__init__(value, name)
        self.function, self.arguments, self.state = reduced(value)
        # A chain has the iterators that it is in, and a cycle a list of what it has yielded.
        self._parts = self.state if isinstance(self.state, tuple) else ()

    def children(self) -> Iterable[tuple[str, Any]]:
        return ((f"[{place}]", part) for place, part in enumerate((*self.arguments, *self._parts)))

    def is_same(self) -> bool:
        function, arguments, state = reduced(self.value)
        return function is self.function and _are_same(arguments, self.arguments) and _are_same((state,), (self.state,))

    @property
    def repeats(self) -> int | None:
        """How many items are left in this pass of a cycle that is past its first one; None of all others.

        A cycle that was made again may stand at the end of a pass where it stood at the beginning of the next.
        """
        if self.function is not itertools.cycle or not self.state or not self.state[1]:
            return None
        return operator.length_hint(self.arguments[0]) % max(1, len(self.state[0]))

    @property
    def rest(self) -> list[Any] | None:
        """What an iterator over a list, a dict or a set still yields; None of all others.

        Those over a dict or a set are made again over a list of the rest.
        """
        if self.function is not iter or len(self.arguments) != 1 or not isinstance(self.arguments[0], list):
            return None
        return self.arguments[0][self.state or 0 :]

    def made_again(self, stands: Stands) -> Any:
        others, parts = list(map(stands, self.arguments)), tuple(map(stands, self._parts))
        if self.is_same() and all(map(operator.is_, (*others, *parts), (*self.arguments, *self._parts))):
            return self.value
        return iterator_of(self.function, others, parts if isinstance(self.state, tuple) else self.state)


def _are_same(now: Any, then: Any) -> bool:
    if len(now) != len(then):
        return False
    pairs = zip(now, then, strict=True)
    return all(
        a is b
        or (type(a) is type(b) and (_are_same(a, b) if isinstance(a, (tuple, list)) else type(a) is int and a == b))
        for a, b in pairs
    )


class Variable(Record):
    """A variable of a closure or of a context."""

    __slots__ = ("content",)

    def __init__(self, value: Any, name: str) -> None:
        super().__init__(value, name)
        self.content = content_of(value)

    def children(self) -> Iterable[tuple[str, Any]]:
        return () if self.content is MISSING else (("", self.content),)

    def is_same(self) -> bool:
        return content_of(self.value) is self.content

    def put_back(self, stands: Stands) -> None:
        if self.content is not MISSING:
            set_content(self.value, stands(self.content))
        elif content_of(self.value) is not MISSING:
            if isinstance(self.value, ContextVar):
                raise ValueError("a variable of a context that had no value then cannot be without one again")
            del self.value.cell_contents


def content_of(variable: types.CellType | ContextVar[Any]) -> Any:
    """Return what a variable of a closure or of a context holds; `MISSING` if it holds nothing."""
    try:
        return variable.get() if isinstance(variable, ContextVar) else variable.cell_contents
    except (LookupError, ValueError):
        return MISSING


def set_content(variable: types.CellType | ContextVar[Any], content: Any) -> None:
    """Make a variable of a closure or of a context hold ``content``."""
    if not isinstance(variable, ContextVar):
        variable.cell_contents = content
    elif content_of(variable) is not content:
        variable.set(content)


class Closure(Record):
    """What a function refers to."""

    __slots__ = ("parts",)

    def __init__(self, value: Any, name: str) -> None:
        super().__init__(value, name)
        self.parts = self._parts_now()

    def _parts_now(self) -> list[tuple[str, Any]]:
        """Return what the function refers to; of a method of torch's or of this package, the object."""
        parts = list(closure_of(self.value))
        foreign = str(getattr(self.value, "__module__", "")).startswith(("lightning_replica", "torch."))
        return [part for part in parts if part[0] == BOUND_TO] if foreign else parts

    def children(self) -> Iterable[tuple[str, Any]]:
        return self.parts

    def is_same(self) -> bool:
        now = self._parts_now()
        return len(now) == len(self.parts) and all(a is b for (_, a), (_, b) in zip(now, self.parts, strict=True))

    def put_back(self, stands: Stands) -> None:
        """Make the function refer to what it has referred to. These objects have records of their own."""
        parts = {name: stands(value) for name, value in self.parts}
        refer(self.value, {**dict(closure_of(self.value)), **parts})


class MethodInC(Remade, Closure):
    """A method written in C, as ``__next__`` of an iterator. It is bound anew if its object is made again."""

    __slots__ = ()

    def made_again(self, stands: Stands) -> Any:
        owner = dict(self.parts).get(BOUND_TO)
        stand = stands(owner)
        return self.value if stand is owner else getattr(stand, self.value.__name__)


def _record_of_function(value: Any, name: str) -> Record:
    return MethodInC(value, name) if isinstance(value, IN_C) else Closure(value, name)


class Cached(Record):
    """What a function has cached, the function itself, and attributes that the user has given it."""

    __slots__ = ("attributes", "items", "keys", "wrapped")

    def __init__(self, value: Any, name: str) -> None:
        super().__init__(value, name)
        entries = entries_of(value)
        self.keys, self.items = [key for key, _ in entries], [result for _, result in entries]
        self.attributes = {name: each for name, each in vars(value).items() if name not in OF_WRAPPERS}
        self.wrapped = getattr(value, "__wrapped__", None)

    def calls(self) -> list[Call]:
        """Return the calls that are cached, one for each of ``items``."""
        return list(map(Cache(self.value).call_of, self.keys)) if self.keys else []

    def children(self) -> Iterable[tuple[str, Any]]:
        yield ".__wrapped__", self.wrapped
        yield from ((f".{name}", each) for name, each in self.attributes.items())
        # By the call: another process may have cached them in another order before training.
        yield from ((f"[{short(key)}]", each) for key, each in zip(self.keys, self.items, strict=True))
        yield from ((f"[call {place}]", key) for place, key in enumerate(self.keys) if type(key) not in ATOMS)

    def length_now(self) -> int:
        return int(self.value.cache_info().currsize)

    def is_same(self) -> bool:
        return self._is_cached() and self._has_attributes()

    def _is_cached(self) -> bool:
        entries = entries_of(self.value)
        return len(entries) == len(self.keys) and all(
            key is then and item is result
            for (key, item), then, result in zip(entries, self.keys, self.items, strict=True)
        )

    def _has_attributes(self) -> bool:
        now = {name: each for name, each in vars(self.value).items() if name not in OF_WRAPPERS}
        return list(now) == list(self.attributes) and all(map(operator.is_, now.values(), self.attributes.values()))

    def put_back(self, stands: Stands) -> None:
        attributes = {name: stands(each) for name, each in self.attributes.items()}
        if not self._has_attributes() or any(attributes[name] is not each for name, each in self.attributes.items()):
            set_attributes_of_wrapper(self.value, attributes)
        items = list(map(stands, self.items))
        if not self._is_cached() or any(map(operator.is_not, items, self.items)):
            Cache(self.value).put_back(list(zip(self.keys, items, strict=True)))


def set_attributes_of_wrapper(function: Any, attributes: Mapping[str, Any]) -> None:
    """Give a function that caches attributes, and no others but those that every such function has."""
    for name in [name for name in vars(function) if name not in OF_WRAPPERS]:
        del vars(function)[name]
    vars(function).update(attributes)


class Scripted(Record):
    """The attributes of a module that torch.jit has compiled, with parameters and buffers."""

    __slots__ = ("values",)

    def __init__(self, value: Any, name: str) -> None:
        super().__init__(value, name)
        self.values = torch_jit.attributes_of(value)

    def children(self) -> Iterable[tuple[str, Any]]:
        return ((f".{name}", value) for name, value in self.values.items())

    def is_same(self) -> bool:
        now = torch_jit.attributes_of(self.value)
        return all(is_alike(now[name], value) for name, value in self.values.items())

    def put_back(self, stands: Stands) -> None:
        now = torch_jit.attributes_of(self.value)
        for name, value in self.values.items():
            then = stands(value)
            if not is_alike(now[name], then):
                torch_jit.set_attribute(self.value, name, then)


def is_alike(a: Any, b: Any) -> bool:
    """Return whether two values are the same object, or containers of the same: those of a script are new each time."""
    if type(a) is not type(b):
        return False
    if isinstance(a, dict):
        return list(a) == list(b) and all(map(is_alike, a.values(), b.values()))
    if isinstance(a, (list, tuple)):
        return len(a) == len(b) and all(map(is_alike, a, b))
    return a is b or (type(a) in ATOMS and is_same_atom(a, b))


class Graphed(Remade):
    """A tensor with a graph. A copy without the graph takes its place, because no graph can be gone through twice."""

    __slots__ = ("_writes", "content")

    def __init__(self, value: Tensor, name: str) -> None:
        super().__init__(value, name)
        self.content, self._writes = copy_of(value), data_version(value)

    def is_same(self) -> bool:
        """Return whether it has its graph yet, and torch has counted no write: most are made anew in each step."""
        return is_graphed(self.value) and data_version(self.value) == self._writes

    def made_again(self, stands: Stands) -> Any:
        return with_class_of(self.content.clone(), self.value)


def is_graphed(value: Tensor) -> bool:
    """Return whether a tensor is the result of an operation that gradients go through."""
    return value.requires_grad and not value.is_leaf


class Rebuilt(Remade):
    """What an object in C consists of."""

    __slots__ = ("parts",)

    def __init__(self, value: Any, name: str, parts: Parts) -> None:
        super().__init__(value, name)
        self.parts = Parts(*with_leaves(tuple(parts), _itself))  # the object may change a container of its own

    def children(self) -> Iterable[tuple[str, Any]]:
        return leaves_of(self.parts)

    def is_same(self) -> bool:
        return has_parts(self.value, self.parts)

    def made_again(self, stands: Stands) -> Any:
        function, *then = self.parts
        arguments, state = with_leaves(tuple(then), stands)
        if self.is_same() and are_alike((arguments, state), tuple(then)):
            return self.value
        if move_back(self.value, Parts(function, arguments, state)):
            return self.value
        return rebuilt(function, arguments, state)

    def renewed(self) -> Record:
        parts = parts_of(self.value)
        return Unknown(self.value, self.name) if parts is None else Rebuilt(self.value, self.name, parts)


def _itself(value: Any) -> Any:
    return value


class Wrapper(Record):
    """The tensors that a tensor of a class of its own consists of, as a quantized one of values and scales."""

    __slots__ = ("inner",)

    def __init__(self, value: Any, name: str) -> None:
        super().__init__(value, name)
        self.inner = self._now()

    def _now(self) -> dict[str, Any]:
        names, _ = self.value.__tensor_flatten__()
        return {name: getattr(self.value, name) for name in names}

    def children(self) -> Iterable[tuple[str, Any]]:
        return ((f".{name}", value) for name, value in self.inner.items())

    def is_same(self) -> bool:
        now = self._now()
        return list(now) == list(self.inner) and all(map(operator.is_, now.values(), self.inner.values()))

    def put_back(self, stands: Stands) -> None:
        for name, value in self.inner.items():
            if getattr(self.value, name) is not value:
                setattr(self.value, name, stands(value))


class ObjectItems(Items):
    """The items of an array of objects."""

    __slots__ = ()

    def __init__(self, value: Any, name: str) -> None:
        super().__init__(value, name)
        self.items = list(value.flat)

    def is_same(self) -> bool:
        return self.value.size == len(self.items) and all(map(operator.is_, self.value.flat, self.items))

    def put_back(self, stands: Stands) -> None:
        for place, item in enumerate(map(stands, self.items)):
            self.value.flat[place] = item


class Unknown(Record):
    """An object whose content is not known, and what shows that it has changed.

    What only its pickled form shows is looked at when a capture is put back, and not in each step.
    """

    __slots__ = ("mark", "pickled")

    def __init__(self, value: Any, name: str) -> None:
        super().__init__(value, name)
        self.mark = probe(value)
        self.pickled: bytes | None = None

    def look_closely(self) -> None:
        """Note what it is pickled as, if nothing else shows a change. Called once for each object."""
        if self.mark is None and not self.advances:
            self.pickled = pickled_digest(self.value)

    @property
    def advances(self) -> bool:
        """Whether it is an iterator of which nothing shows how far it has come."""
        cls = type(self.value)
        return self.mark is None and hasattr(cls, "__next__") and not is_harmless(cls)

    def is_same(self) -> bool:
        return bool(probe(self.value) == self.mark)

    def has_changed(self) -> bool | None:
        """Return whether it has changed since it was recorded; None if nothing shows that."""
        if self.mark is not None:
            return not self.is_same()
        return None if self.pickled is None else pickled_digest(self.value) != self.pickled

    def put_back(self, stands: Stands) -> None:
        """Do nothing: it cannot be done. `Recorder` has reported it."""


class Block(Unknown):
    """The generator of a context manager: it waits for the end of its block, which may end in another step."""

    __slots__ = ()

    def __init__(self, value: Any, name: str) -> None:
        super().__init__(value, name)
        self.mark = inspect.getgeneratorstate(value)

    def is_same(self) -> bool:
        return bool(inspect.getgeneratorstate(self.value) == self.mark)


OF_KIND: dict[Kind, Callable[[Any, str], Record]] = {
    Kind.TUPLE: Fixed,
    Kind.LIST: Items,
    Kind.DICT: Entries,
    Kind.SET: Members,
    Kind.VIEW: View,
    Kind.ARRAY: ObjectItems,
    Kind.BYTES: Bytes,
    Kind.MEMORY: Memory,
    Kind.STREAM: Stream,
    Kind.GENERATOR: Randomness,
    Kind.ITERATOR: Iterated,
    Kind.FUNCTION: _record_of_function,
    Kind.CACHE: Cached,
    Kind.SCRIPT: Scripted,
    Kind.CELL: Variable,
    Kind.OPAQUE: Unknown,
}


def refer(function: Any, parts: Mapping[str, Any]) -> None:
    """Make a function or a partial refer to ``parts``, which are named as `closure_of` does; cells hold their own."""
    if not parts or all(value is parts[name] for name, value in closure_of(function)):
        return
    if isinstance(function, types.FunctionType):
        function.__defaults__, function.__kwdefaults__ = parts[".__defaults__"], parts[".__kwdefaults__"]
    elif isinstance(function, functools.partial):
        state = tuple(parts[name] for name in (".func", ".args", ".keywords", ".__dict__"))
        function.__setstate__(state)  # type: ignore[attr-defined]


def wake_waiting(values: Iterable[Any]) -> None:
    """Wake the threads that wait at conditions, as those of a queue: what they wait for may be true now."""
    for value in values:
        if issubclass(type(value), threading.Condition) and value.acquire(blocking=False):
            try:
                value.notify_all()
            finally:
                value.release()


def fill_stream(stream: Any, content: Any, place: int) -> None:
    """Make a stream in memory hold ``content``, and stand at ``place``."""
    stream.seek(0)
    stream.truncate()
    stream.write(content)
    stream.seek(place)


def is_registered(value: Any, name: str) -> bool:
    """Return whether an attribute of a module is a parameter, a buffer or a submodule, which other code restores."""
    if not isinstance(value, nn.Module):
        return False
    return name in value._parameters or name in value._buffers or name in value._modules
