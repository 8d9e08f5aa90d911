"""Captured state as plain data for another process, which puts it into its own objects.

Every object that others may refer to has a number. An object that is met again is a reference to that number, and an
anchor is a reference to its name. So who refers to what is the same in the other process. There, the script has built
the same roots. What comes is put into the object that had the same name when training began, whatever refers to it now;
an object that has been made since is put into the object that stands in its place, if nothing else refers to that. Both
must be of the same class. An object that is not there is made, without calling any code of its class; its class must be
known already, as no module is imported and nothing is unpickled.

What cannot be sent is left as the other process has built it, and is reported.
"""

import array
import ast
import collections
import datetime
import decimal
import enum
import fractions
import functools
import hashlib
import io
import re
import sys
import types
import uuid
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import PosixPath, PurePosixPath, PureWindowsPath, WindowsPath
from types import MappingProxyType
from typing import Any, Final

import numpy as np
import torch
from torch import Tensor, nn

from lightning_replica._compat import torch_jit
from lightning_replica._compat.dtensor import local_of, set_local
from lightning_replica._compat.torch import of_class
from lightning_replica.core.inexact import Report
from lightning_replica.core.user_code import CACHE
from lightning_replica.errors import TransferError
from lightning_replica.state.atoms import ATOMS, is_plain_atom, is_same_atom
from lightning_replica.state.objects.caches import Cache, Call, Entry
from lightning_replica.state.objects.capture import Anchors, Capture, Content
from lightning_replica.state.objects.contents import fill, is_content, memory_of_original, plain_of
from lightning_replica.state.objects.kinds import (
    BOUND_TO,
    IN_C,
    ITERTOOLS,
    OF_CLASSES,
    VIEWS,
    Kind,
    closure_of,
    derives_attributes,
    describe,
    has_attributes,
    has_value,
    is_made_in_python,
    is_of_pandas,
    iterator_of,
    kind_of,
    kind_of_class,
    reduced,
    slots_of,
    value_of,
    wrapped_in,
)
from lightning_replica.state.objects.randomness import bits_of, generator_of
from lightning_replica.state.objects.rebuilding import Parts, has_parts, leaves_of, parts_of, rebuilt
from lightning_replica.state.objects.records import (
    GRADIENT,
    MISSING,
    REQUIRES_GRAD,
    Attributes,
    Bytes,
    Cached,
    Closure,
    Entries,
    Fixed,
    Graphed,
    Items,
    Iterated,
    Members,
    Memory,
    Randomness,
    Rebuilt,
    Record,
    Scripted,
    Slots,
    Stream,
    Variable,
    View,
    base_of,
    content_of,
    delete_attribute,
    fill_memory,
    fill_stream,
    fixed_of,
    is_alike,
    is_registered,
    mapping_of,
    refer,
    set_attribute,
    set_attributes_of_wrapper,
    set_content,
    slot_of,
    slot_values,
)
from lightning_replica.state.objects.segments import BrokenUpError, Part, Segment, Segments, rows_of
from lightning_replica.state.objects.sets import refill
from lightning_replica.state.objects.shared_memory import (
    Memories,
    OwnedMemory,
    Place,
    Sharing,
    address_of,
    array_over,
    memories_of,
    shared_memories,
)

_DEEP: Final = 200  # objects in objects; lists that are linked deeper than this are not sent
_EMPTY_BODY: Final = frozenset(
    ("__module__", "__qualname__", "__doc__", "__dict__", "__weakref__", "__firstlineno__", "__static_attributes__")
)
_AS_TEXT: Final[Mapping[type, tuple[Callable[[Any], str], Callable[[str], Any]]]] = {
    datetime.datetime: (datetime.datetime.isoformat, datetime.datetime.fromisoformat),
    datetime.date: (datetime.date.isoformat, datetime.date.fromisoformat),
    datetime.time: (datetime.time.isoformat, datetime.time.fromisoformat),
    decimal.Decimal: (str, decimal.Decimal),
    fractions.Fraction: (str, fractions.Fraction),
    uuid.UUID: (str, uuid.UUID),
}
_PARTIAL: Final = describe(functools.partial(print))
_GONE: Final = "-"
# Types of arrays that can be tensors.
_OF_TORCH: Final = ("b1", "i1", "i2", "i4", "i8", "u1", "u2", "u4", "u8", "f2", "f4", "f8", "c8", "c16")
_BY_ROW: Final = {"csr": torch.sparse_csr, "bsr": torch.sparse_bsr}
_BY_COLUMN: Final = {"csc": torch.sparse_csc, "bsc": torch.sparse_bsc}
_ADDRESSES: Final = 2**32  # smaller numbers are no ``id``
_OURS: Final = __name__.partition(".")[0] + "."  # a tool of this package, which leaves as it came


class Encoder:
    """Turns a capture into plain data.

    Args:
        capture: What was reachable, with its contents.
        anchors: What has a name in every process.
        report: Called with the name of what cannot be sent, and why.
        first: What was reachable when training began, if the other process has that.
        names: The names that objects had then, by ``id``.
        owners: The tensors and arrays that there were then, by the address of their memory.
        segments: The segments of long lists and dicts; without any, all items are encoded one by one.
    """

    def __init__(
        self,
        capture: Capture,
        anchors: Anchors,
        report: Report,
        first: Capture | None = None,
        names: Mapping[int, str] = MappingProxyType({}),
        owners: Mapping[int, Any] = MappingProxyType({}),
        segments: Segments | None = None,
    ) -> None:
        self._capture, self._anchors, self._report, self._first = capture, anchors, report, first
        self._names, self._owners, self._segments = names, owners, segments or Segments()
        self._memory = OwnedMemory(owners)
        self._copies = capture.copies_by_id()
        self._used: dict[int, Segment] = {}
        self._numbers: dict[int, int] = {}
        self._classes: dict[str, type] = {}
        self._attributes: dict[int, Any] = {}
        self._alone: set[int] = set()  # arrays that share their memory with no other one in the other process
        self._sharing = Sharing()

    def finish(self) -> list[Any]:
        """Tell in what was returned which tensors and arrays lie in one memory. Called once, at the end.

        Returns:
            The segments of lists that what was returned refers to.
        """
        self._sharing.tell()
        return [segment.sent for segment in self._used.values()]

    def attributes(self, record: Attributes, names: frozenset[str] | None = None) -> list[Any]:
        """Return the attributes of a root: pairs of a name and a value.

        Args:
            record: What the root held.
            names: Those that are wanted, also of attributes that are gone; None for all that are there.
        """
        sent = []
        for name, value in zip(record.names, record.values, strict=True):
            if names is None or name in names:
                sent.append([name, self._encode_attribute(value, f"{record.name}.{name}")])
        gone = sorted(names - {*record.names}) if names is not None else []
        return [*sent, *([name, [_GONE]] for name in gone)]

    def _encode_attribute(self, value: Any, name: str) -> Any:
        known = len(self._numbers)
        try:
            return self._encode(value, name, 0)
        except BrokenUpError:
            raise
        except Exception as error:  # classes of the user's and of torch run code of their own, or refuse
            self._report(name, f"it cannot be sent to a replacement ({type(error).__name__}: {error})", "replacement")
            self._numbers = {key: number for key, number in self._numbers.items() if number < known}
            return ["?", describe(value)]

    def _encode(self, value: Any, name: str, depth: int) -> Any:
        if type(value) in ATOMS:
            if type(value) is int and value >= _ADDRESSES:
                return self._encode_large(value, name, depth)
            return value if is_plain_atom(value) else _encode_odd(value)
        key = id(value)
        if key in self._anchors.names:
            return ["@", self._anchors.names[key]]
        if key in self._numbers:
            return ["#", self._numbers[key]]
        if key in self._segments.numbers:
            number, segment = self._segments.numbers[key]
            self._used[segment.first] = segment
            return ["#", number]
        kind = kind_of(value)
        if type(value) is weakref.ref:
            if value.__callback__ is not None and id(value) not in self._names:
                self._report(name, "its callback is not called in a replacement", "replacement")
            return ["weak", self._encode(value(), name, depth + 1)]
        if kind is Kind.ATOM:
            return _encode_atom(value)
        if depth > _DEEP:
            self._report(name, "it lies too deep to be sent to a replacement", "replacement")
            return self._left_out(value)
        self._numbers[key] = len(self._numbers)
        identity = self._identity(value, kind)
        sent = self._encode_new(value, kind, identity, name, depth)
        attributes = self._capture.records.get(~key)
        with_more = isinstance(attributes, (Attributes, Slots)) or (
            kind is Kind.ARRAY and type(value) is not np.ndarray
        )
        if kind is Kind.OBJECT or not with_more:
            return sent
        # A list, a tensor or an array with attributes, or an array of a class of its own.
        pairs = None if _is_its_own_dict(value) else self._pairs([attributes], name, depth)
        return ["with", identity, _class_of(value), sent, pairs]

    def _encode_large(self, number: int, name: str, depth: int) -> Any:
        """Return a large number; if it is the ``id`` of an object, which one that is."""
        if number in self._anchors.names:
            return ["id", ["@", self._anchors.names[number]]]
        records = self._capture.records
        found = records[number].value if number in records else self._tensors.get(number, MISSING)
        if found is not MISSING:
            return ["id", self._encode(found, name, depth)]
        return number if is_plain_atom(number) else _encode_odd(number)

    @functools.cached_property
    def _tensors(self) -> Mapping[int, Any]:
        return {id(held.value): held.value for held, _ in self._capture.copies}

    def _identity(self, value: Any, kind: Kind) -> list[Any]:
        """Return the number of an object, and its name when training began: None if it is new, "" if unknown."""
        key = id(value)
        has_record = kind is not Kind.FUNCTION or key in self._capture.records
        return [self._numbers[key], self._names.get(key, None if has_record else "")]

    def _encode_new(self, value: Any, kind: Kind, identity: list[Any], name: str, depth: int) -> Any:
        key = id(value)
        if kind is Kind.TENSOR:
            return self._encode_tensor(value, identity, name)
        record = self._capture.records.get(key)
        if kind is Kind.ARRAY and self._anchors.has_memory_of(value):
            own = plain_of(value)
            where = [self._anchors.name_of_memory(value), own.__array_interface__["data"][0] - address_of(own)]
            return ["view of an array", identity, *where, own.dtype.str, list(own.shape), list(own.strides)]
        if kind is Kind.ARRAY:
            self._report_bytes_under(value, name)
            content: Any = record.copy if isinstance(record, Content) else self._copies.get(key)
            content = plain_of(value) if content is None else content
            if content.dtype.isnative and content.dtype.str[1:] in _OF_TORCH:
                return self._placed(value, ["array", identity, torch.from_numpy(np.array(content, order="C"))])
            return self._encode_array(value, content, identity, name, depth)
        if kind is Kind.OBJECT:
            slots = self._capture.records.get(~key)
            return self._encode_object(value, identity, record, slots, name, depth)
        if issubclass(type(value), OF_CLASSES) and not _is_of_its_class(value):
            self._report(name, f"a {describe(value)} that was exchanged cannot be sent to a replacement", "replacement")
            return self._left_out(value)
        if record is not None:
            return self._encode_record(record, identity, name, depth)
        if kind is Kind.FUNCTION:  # it keeps nothing
            return ["function", identity, title_of(value), _source_of(value), []]
        if kind is Kind.TUPLE:  # of atoms only
            items = [self._encode(item, name, depth + 1) for item in base_of(value).__iter__(value)]
            kind_of_items = "tuple" if isinstance(value, tuple) else "frozenset"
            return [kind_of_items, identity, _class_of(value), items, *_made_class_of(value)]
        return self._left_out(value)

    def _report_bytes_under(self, value: Any, name: str) -> None:
        """Report an array made in training that shows the bytes of an object of Python's."""
        base = value
        while isinstance(base, np.ndarray):
            base = base.base
            is_new = id(value) not in self._names and id(value) not in self._alone
            is_of_objects = isinstance(base, np.ndarray) and base.dtype.hasobject
            if is_new and is_of_objects and id(base) in self._capture.records:
                why = "it shows a part of another array of objects, which it will not do in a replacement"
                self._report(name, why, "replacement")
                return
        base = base.obj if isinstance(base, memoryview) else base
        if isinstance(base, (bytearray, array.array)) and id(value) not in self._names:
            why = f"it shows the content of a {type(base).__name__}, which it will not do in a replacement"
            self._report(name, why, "replacement")

    def _encode_array(self, value: Any, content: Any, identity: list[Any], name: str, depth: int) -> Any:
        """Return an array of times, texts, records or objects."""
        shape = list(content.shape)
        if content.dtype == object:
            items = [self._encode(item, f"{name}[{n}]", depth + 1) for n, item in enumerate(content.flat)]
            return ["objects", identity, shape, items]
        if content.dtype.hasobject:
            self._report(
                name, "an array of records with objects in them cannot be sent to a replacement", "replacement"
            )
            return self._left_out(content)
        described = repr(np.lib.format.dtype_to_descr(content.dtype))
        return self._placed(value, ["bits", identity, described, shape, content.tobytes()])

    def _placed(self, value: Any, sent: list[Any]) -> list[Any]:
        """Return what is sent for a tensor or an array; with what owns its memory, if that is not sent by itself."""
        if id(value) in self._alone:
            return sent
        self._segments.leave_memory_of(value)
        sent = self._sharing.add(value, sent)
        stands = id(value) in self._names and self._has_first_memory(value)
        address = 0 if stands else self._memory.address_of(value)
        owner = self._owners.get(address)
        if owner is None or address_of(owner) != address or id(owner) not in self._copies:
            return sent  # nothing refers to it any more, or there is none
        return ["beside", self._names[id(owner)], self._sharing.add(owner, []), sent]

    @functools.cached_property
    def _first_copies(self) -> Mapping[int, Any]:
        return {} if self._first is None else self._first.copies_by_id()

    def _has_first_memory(self, value: Any) -> bool:
        """Return whether the memory of a tensor is that which it had when training began; ``.data`` may be set."""
        memory = memory_of_original(self._first_copies.get(id(value)))
        return memory is None or memory.data_ptr() == plain_of(value).data_ptr()

    def _left_out(self, value: Any) -> list[Any]:
        """Return what stands for a value that cannot be sent: "?" if the other process may have the same."""
        recorded = kind_of(value) is not Kind.CLOSED
        is_new = recorded and self._first is not None and id(value) not in self._first.records
        return ["!" if is_new else "?", describe(value)]

    def _encode_tensor(self, value: Tensor, identity: list[Any], name: str) -> Any:
        record, content = self._capture.records.get(id(value)), self._copies.get(id(value))
        if isinstance(record, Graphed):
            content = record.content
        elif isinstance(record, Content):
            content = record.copy
        elif self._anchors.has_memory_of(value):
            return ["view", identity, *self._place_of(value)]
        elif content is None:
            content = plain_of(value)
        if content.layout is torch.sparse_coo:
            parts = content.detach()
            indices, values = parts._indices(), parts._values()
            return ["sparse", identity, indices, values, list(parts.shape), parts.is_coalesced()]
        for layout, known in _BY_ROW.items():
            if content.layout is known:
                indices = [content.crow_indices(), content.col_indices()]
                return ["compressed", identity, layout, *indices, content.values().detach(), list(content.shape)]
        for layout, known in _BY_COLUMN.items():
            if content.layout is known:
                indices = [content.ccol_indices(), content.row_indices()]
                return ["compressed", identity, layout, *indices, content.values().detach(), list(content.shape)]
        if not is_content(content):
            why = f"a {describe(value)} of layout {content.layout} cannot be sent to a replacement"
            self._report(name, why, "replacement")
            return self._left_out(value)
        leaf = value.requires_grad and value.is_leaf
        return self._placed(value, ["tensor", identity, _class_of(value), content.contiguous(), leaf])

    def _place_of(self, value: Tensor) -> list[Any]:
        own = plain_of(value)
        return [
            self._anchors.name_of_memory(value),
            own.storage_offset(),
            list(own.shape),
            list(own.stride()),
            str(own.dtype)[6:],
        ]

    def _encode_object(
        self, value: Any, identity: list[Any], record: Record | None, slots: Record | None, name: str, depth: int
    ) -> Any:
        if not isinstance(record, Attributes) and not isinstance(slots, Slots):
            return self._left_out(value)
        self._report_what_is_shared(value, identity, name)
        pairs = self._pairs([record, slots], name, depth)
        if has_value(type(value)):
            return ["value", identity, _class_of(value), self._encode(value_of(value), name, depth + 1), pairs]
        return ["object", identity, _class_of(value), pairs]

    def _report_what_is_shared(self, value: Any, identity: list[Any], name: str) -> None:
        """Report an object whose class has a name that another one has, and a new one with the attributes of another.

        A function that makes a class makes another one of that name each time.
        """
        if identity[1] is not None:  # it is there in the other process
            return
        cls = type(value)
        if self._classes.setdefault(_name_of(cls), cls) is not cls:
            why = f"there are several classes {_name_of(cls)}, so a replacement may have made it of another one"
            self._report(name, why, "replacement")
        if has_attributes(value) and self._attributes.setdefault(id(vars(value)), value) is not value:
            why = "it shares its `__dict__` with another object, which it will not do in a replacement"
            self._report(name, why, "replacement")

    def _pairs(self, records: Iterable[Record | None], name: str, depth: int) -> list[Any]:
        pairs = [pair for record in records if record is not None for pair in self._named(record, name, depth)]
        return [[attribute[1:], sent] for attribute, sent in pairs]

    def _named(self, record: Record, name: str, depth: int) -> list[Any]:
        return [[child, self._encode(value, name + child, depth + 1)] for child, value in record.children()]

    def _encode_record(self, record: Record, identity: list[Any], name: str, depth: int) -> Any:
        def all_of(values: Any) -> list[Any]:
            return [self._encode(each, f"{name}[{place}]", depth + 1) for place, each in enumerate(values)]

        value = record.value
        if isinstance(record, Entries):
            divided = self._segments.parts_of(record)
            if divided is not None:
                sent = ["segmented dict", identity, _class_of(value), self._parts(record, divided, name, depth)]
            else:
                keys = [self._encode(key, name, depth + 1) for key in record.keys]
                sent = ["dict", identity, _class_of(value), keys, all_of(record.items)]
            if isinstance(value, collections.defaultdict):
                sent.append(self._encode(record.factory, f"{name}.default_factory", depth + 1))
            return sent
        if isinstance(record, Fixed):
            kind = "tuple" if isinstance(value, tuple) else "frozenset"
            return [kind, identity, _class_of(value), all_of(record.items), *_made_class_of(value)]
        if isinstance(record, Items):
            maxlen = value.maxlen if isinstance(value, deque) else None
            divided = self._segments.parts_of(record)
            if divided is not None:
                return ["segmented", identity, _class_of(value), self._parts(record, divided, name, depth), maxlen]
            return [
                "deque" if isinstance(value, deque) else "list",
                identity,
                _class_of(value),
                all_of(record.items),
                maxlen,
            ]
        if isinstance(record, Members):
            members = [self._encode(each, f"{name}[{n}]", depth + 1) for n, each in enumerate(record.members)]
            return ["set", identity, _class_of(value), members, record.length, record.pops]
        if isinstance(record, Randomness):
            bits = [self._encode(each, name + child, depth + 1) for child, each in record.children()]
            return ["random", identity, _state_to_plain(record.state), *bits]
        if isinstance(record, Bytes) and type(value) not in (bytearray, array.array):
            self._report(name, f"a {describe(value)} cannot be sent to a replacement", "replacement")
        elif isinstance(record, Bytes):
            code = value.typecode if isinstance(value, array.array) else ""
            return ["bytes", identity, code, bytes(record.content)]
        if isinstance(record, Memory):
            return ["memory", identity, _class_of(value), record.content]
        if isinstance(record, Stream) and record.content is not None:
            return ["stream", identity, *record.content]
        if isinstance(record, Closure):
            return ["function", identity, title_of(value), _source_of(value), self._named(record, name, depth)]
        if isinstance(record, Scripted):
            return ["script", identity, self._pairs([record], name, depth)]
        if isinstance(record, Cached):
            calls = [
                [all_of(call.arguments), [*call.keywords], all_of(call.keywords.values())] for call in record.calls()
            ]
            parts = [record.wrapped, *record.attributes.values()]
            wrapped, *attributes = [self._encode(each, name, depth + 1) for each in parts]
            pairs = [list(pair) for pair in zip(record.attributes, attributes, strict=True)]
            return ["cache", identity, title_of(value), wrapped, pairs, calls, all_of(record.items)]
        if isinstance(record, Iterated):
            state = self._encode(record.state, name, depth + 1)
            return ["iterator", identity, record.function.__name__, all_of(record.arguments), state]
        if isinstance(record, Rebuilt):
            alone = is_of_pandas(type(value))  # its tables copy on write, and know who shares a memory
            parts = [self._encode_part(part, name, depth, alone) for part in record.parts[1:]]
            return ["rebuilt", identity, _class_of(value), _name_of_maker(record.parts.function), *parts]
        if isinstance(record, View):
            return ["mapping view", identity, type(value).__name__, self._encode(record.mapping, name, depth + 1)]
        if isinstance(record, Variable):
            return ["cell", identity, *all_of([value for _, value in record.children()])]
        return self._left_out(value)

    def _parts(self, record: Items | Entries, parts: Iterable[Part], name: str, depth: int) -> list[Any]:
        """Return, for each part, the first number of a segment, or encoded items; of a dict, with encoded keys."""
        sent: list[Any] = []
        for part in parts:
            if isinstance(part, Segment):
                self._used[part.first] = part
                sent.append(part.first)
                continue
            items = [self._encode(record.items[place], f"{name}[{place}]", depth + 1) for place in part]
            if isinstance(record, Entries):
                items = [[self._encode(record.keys[place], name, depth + 1) for place in part], items]
            sent.append(items)
        return sent

    def _encode_part(self, part: Any, name: str, depth: int, alone: bool) -> list[Any]:
        if type(part) is dict:
            keys = [self._encode(key, name, depth + 1) for key in part]
            return ["dict", keys, [self._encode_part(each, name, depth, alone) for each in part.values()]]
        if type(part) in (tuple, list):
            return [type(part).__name__, [self._encode_part(each, name, depth, alone) for each in part]]
        if isinstance(part, np.ndarray) and alone:
            self._alone.add(id(part))
            if id(part) in self._numbers:  # in another table: here it is another array
                self._numbers[-1 - len(self._numbers)] = self._numbers.pop(id(part))
        return ["", self._encode(part, name, depth + 1)]


@dataclass
class Decoder:
    """Puts what an `Encoder` has made into the objects of this process.

    Attributes:
        anchored: The anchors by their names.
        report: Called with the name of what could not be put in place, and why.
        existing: The objects of this process by the names that they had when training began.
        elsewhere: The ``id`` of each object that attributes lead to which are not sent, because they have not changed.
    """

    anchored: Mapping[str, Any]
    report: Report
    existing: Mapping[str, Any] = field(default_factory=dict)
    elsewhere: frozenset[int] = frozenset()

    def __post_init__(self) -> None:
        self._memories = Memories()
        self._segments: dict[int, list[Any]] = {}
        self._shared: frozenset[int] | None = None
        self._made: dict[int, Any] = {}
        self._used: set[int] = set()
        self._classes: dict[str, type] = {}  # that the script of the other process has made
        self._claimed: set[str] = set()  # names of objects that stand for themselves
        self._lacking = 0  # parts that could not be put in place

    def _lacks(self, name: str, why: str) -> None:
        self._lacking += 1
        self.report(name, why, "once")

    def make_segments(self, sent: list[Any]) -> None:
        """Make what the segments of lists hold, which attributes refer to. Called before all others."""
        for each in sent:
            first, rows, objects = rows_of(each)
            self._segments[first] = rows
            for number, made in enumerate(objects, start=first):
                self._keep(number, made)

    def put_attributes(self, root: Any, name: str, sent: list[Any]) -> None:
        """Set the attributes of a root."""
        now = vars(root)
        for attribute, value in sent:
            if is_registered(root, attribute):
                continue
            if value == [_GONE]:
                if attribute in now:
                    delete_attribute(root, attribute)
                continue
            try:
                found = self._decode(value, now.get(attribute, MISSING), f"{name}.{attribute}")
                if found is not MISSING:
                    set_attribute(root, attribute, found)
            except Exception as error:  # a class of the user's refuses, or is not there; it would be so each time
                why = f"it cannot be put in place in this replacement ({type(error).__name__}: {error})"
                self._lacks(f"{name}.{attribute}", why)

    def _decode(self, sent: Any, current: Any, name: str) -> Any:
        if not isinstance(sent, list):
            return sent
        kind, *rest = sent
        if kind == "@":
            if rest[0] not in self.anchored:
                self._lacks(name, f"there is no {rest[0]} in this replacement")
                return current
            return self.anchored[rest[0]]
        if kind == "#":
            if rest[0] not in self._made and current is MISSING:
                self._lacks(name, "what it refers to could not be made in a replacement")
            return self._made.get(rest[0], current)
        if kind in ("?", "!"):
            is_there = kind == "?" and current is not MISSING and describe(current) == rest[0]
            if not is_there and not rest[0].startswith(_OURS):
                self._lacks(name, f"a {rest[0]} cannot be sent to a replacement")
            return current
        if kind == "~":
            if current is MISSING or [describe(current), repr(current)] != rest:
                self._lacks(name, f"{rest[1]} cannot be sent to a replacement")
            return current
        if kind == "id":
            return id(self._decode(rest[0], MISSING, name))
        if kind == "weak":
            return self._weak(rest[0], current, name)
        if kind == "beside":
            owner, places, inner = rest
            existing = self.existing.get(owner)
            is_itself = owner in self._claimed or id(existing) not in self._used
            if not is_itself or not all(self._memories.holds(place, existing) for place in places):
                self._lacks(name, f"it lies in the memory of {owner}, but not in this replacement")
            return self._decode(inner, current, name)
        if kind == "class":
            return self._class(*rest, current=current, name=name)
        if kind in _ATOMS:
            return _ATOMS[kind](*rest)
        (number, first_name), *content = rest
        if first_name is None:
            if id(current) in self.elsewhere:
                current = MISSING  # what stood there is another object, which is still used and has not changed
        else:
            current = self.existing.get(first_name, current)
            self._claimed.add(first_name)
        if current is not MISSING and id(current) in self._used:
            current = MISSING  # it stands for another object already
        made = _READERS[kind](self, number, content, current, name)
        if id(current) in self.elsewhere:
            made = current  # other attributes refer to it, and it has not changed
        if made is not MISSING:  # else whoever else refers to it keeps what stands there
            self._keep(number, made)
        return made

    def _weak(self, sent: Any, current: Any, name: str) -> Any:
        """Return a weak reference. What nothing else refers to is gone at once, as it will be in the other process."""
        was = current() if isinstance(current, weakref.ref) else MISSING
        target = self._decode(sent, was, name)
        if target is was:
            return current
        return weakref.ref(set() if target is None or target is MISSING else target)

    def _class(self, title: str, parts: Any, *, current: Any, name: str) -> Any:
        """Return a class: one that is known by this name, or one that is made of its bases."""
        if isinstance(current, type) and _name_of(current) == title:
            return current
        found = _class_named(title) or self._classes.get(title) or _class_of_parts(title, parts)
        if found is None:
            self._lacks(name, f"the class {title} cannot be sent to a replacement")
            return current
        self._classes[title] = found
        return found

    def _keep(self, number: int, made: Any) -> None:
        self._made[number] = made
        if kind_of(made) is not Kind.ATOM:
            self._used.add(id(made))

    def _all(self, sent: list[Any], existing: list[Any], name: str) -> list[Any]:
        existing = existing + [MISSING] * (len(sent) - len(existing))
        found = [
            self._decode(each, now, f"{name}[{n}]") for n, (each, now) in enumerate(zip(sent, existing, strict=False))
        ]
        return [None if each is MISSING else each for each in found]

    def _array(self, number: int, content: list[Any], current: Any, name: str) -> Any:
        values, *places = content
        return self._filled(current, values.numpy(), places, name)

    def _bits(self, number: int, content: list[Any], current: Any, name: str) -> Any:
        described, shape, data, *places = content
        dtype = np.lib.format.descr_to_dtype(ast.literal_eval(described))
        return self._filled(current, np.frombuffer(bytearray(data), dtype=dtype).reshape(shape), places, name)

    def _filled(self, current: Any, array_: Any, places: list[Place], name: str) -> Any:
        """Return the present array with the content of ``array_`` if it is like it, or else ``array_``."""
        fits = isinstance(current, np.ndarray) and (current.shape, current.dtype) == (array_.shape, array_.dtype)
        if fits and plain_of(current).flags.writeable and self._may_fill(plain_of(current), places):
            plain_of(current)[...] = array_
            return current
        for place in places:
            array_ = self._placed(self._memories.array(place, array_), array_, name)
        return array_ if places else array_.copy()  # which owns its memory, so that code can resize it

    def _may_fill(self, current: Any, places: list[Place]) -> bool:
        """Return whether a value that is here can take what was sent, and nothing else changes with it that should not.

        What was a view when training began may no longer be one.
        """
        if places:
            return all(self._memories.holds(place, current) for place in places)
        if self._shared is None:
            self._shared = shared_memories(self.existing.values()) | memories_of(self.anchored.values())
        return address_of(current) not in self._shared

    def _placed(self, placed: Any, alone: Any, name: str) -> Any:
        if placed is None:
            self._lacks(name, "it shares memory with another tensor or array, but not in this replacement")
        return alone if placed is None else placed

    def _objects(self, number: int, content: list[Any], current: Any, name: str) -> Any:
        shape, sent = content
        existing = list(current.flat) if isinstance(current, np.ndarray) and current.size == len(sent) else []
        made = np.empty(len(sent), dtype=object)
        for place, item in enumerate(self._all(sent, existing, name)):
            made[place] = item
        return self._filled(current, made.reshape(shape), [], name)

    def _sparse(self, number: int, content: list[Any], current: Any, name: str) -> Any:
        indices, values, shape, coalesced = content
        return torch.sparse_coo_tensor(indices, values, tuple(shape), check_invariants=True, is_coalesced=coalesced)

    def _compressed(self, number: int, content: list[Any], current: Any, name: str) -> Any:
        layout, first, second, values, shape = content
        found = {**_BY_ROW, **_BY_COLUMN}[layout]
        return torch.sparse_compressed_tensor(first, second, values, tuple(shape), layout=found, check_invariants=True)

    def _tensor(self, number: int, content: list[Any], current: Any, name: str) -> Any:
        cls, values, leaf, *places = content
        if isinstance(current, Tensor) and _is_a(current, cls):
            own = local_of(current)
            fits = own.is_leaf and (own.shape, own.dtype, own.device) == (values.shape, values.dtype, values.device)
            if fits and self._may_fill(plain_of(own), places):
                fill(plain_of(own), values)
                return current if current.requires_grad == leaf else current.requires_grad_(leaf)
        for place in places:
            values = self._placed(self._memories.tensor(place, values), values, name)
        values = values if places else values.clone()  # which owns its memory, so that code can resize it
        made = _class_named(cls)
        if made is nn.Parameter:
            return nn.Parameter(values, requires_grad=leaf)
        if made is not Tensor and isinstance(made, type) and issubclass(made, Tensor):
            values = of_class(values, made)
        return Tensor.requires_grad_(values, leaf)

    def _with(self, number: int, content: list[Any], current: Any, name: str) -> Any:
        cls, sent, pairs = content
        made = self._decode(sent, current, name)
        if isinstance(made, np.ndarray) and not _is_a(made, cls):
            self._lacks(name, f"a {cls} cannot be made in a replacement")
            return made
        if made is MISSING or not (has_attributes(made) or slots_of(type(made))):
            return made
        if _is_its_own_dict(made) != (pairs is None):
            object.__setattr__(made, "__dict__", made if pairs is None else {})
        if pairs is not None:
            self._set_attributes(made, pairs, name)
        return made

    def _function(self, number: int, content: list[Any], current: Any, name: str) -> Any:
        title, source, sent = content
        made = current if current is not MISSING and title_of(current) == title else _function_named(source)
        if _qualname_in(title) == _PARTIAL and made is None:
            made = functools.partial(_nothing)
        if made is None and [part for part, _ in sent] == [BOUND_TO]:  # a method written in C, as that of a list
            owner = self._decode(sent[0][1], MISSING, name + BOUND_TO)
            made = getattr(owner, _qualname_in(title).rpartition(".")[2], None)
            return made if isinstance(made, IN_C) else current
        if made is None:
            self._lacks(name, f"the function {_qualname_in(title)} cannot be sent to a replacement")
            return current
        self._keep(number, made)
        now = dict(closure_of(made))
        if issubclass(type(made), OF_CLASSES):
            for part, each in sent:
                self._decode(each, now.get(part, MISSING), f"{name}{part}")  # fills the function in place
            return made
        parts = {part: self._decode(each, now.get(part, MISSING), f"{name}{part}") for part, each in sent}
        owner = parts.pop(BOUND_TO, MISSING)
        function = getattr(made, "__func__", made)
        if parts.keys() == now.keys() - {BOUND_TO}:
            refer(function, {part: now[part] if each is MISSING else each for part, each in parts.items()})
        if owner is MISSING or owner is now.get(BOUND_TO):
            return made
        if isinstance(made, IN_C):
            return getattr(owner, made.__name__)
        return types.MethodType(function, owner)

    def _script(self, number: int, content: list[Any], current: Any, name: str) -> Any:
        if kind_of(current) is not Kind.SCRIPT:
            self._lacks(name, "a module of torch.jit cannot be sent to a replacement")
            return current
        self._keep(number, current)
        now, was = torch_jit.attributes_of(current), torch_jit.attributes_of(current)
        for attribute, sent in content[0]:
            value = self._decode(sent, now.get(attribute, MISSING), f"{name}.{attribute}")  # fills a list in place
            if attribute in was and not is_alike(was[attribute], value):
                torch_jit.set_attribute(current, attribute, value)
        return current

    def _cache(self, number: int, content: list[Any], current: Any, name: str) -> Any:
        title, wrapped, pairs, sent_calls, sent = content
        if not isinstance(current, CACHE) or title_of(current) != title:
            self._lacks(name, f"the function {_qualname_in(title)} cannot be sent to a replacement")
            return current
        self._keep(number, current)
        self._decode(wrapped, getattr(current, "__wrapped__", MISSING), f"{name}.__wrapped__")
        now, attributes = vars(current), dict[str, Any]()
        for attribute, each in pairs:
            attributes[attribute] = self._decode(each, now.get(attribute, MISSING), f"{name}.{attribute}")
        set_attributes_of_wrapper(current, {key: each for key, each in attributes.items() if each is not MISSING})
        cache, entries = Cache(current), list[Entry]()
        was = cache.entries()
        existing = dict(was)
        for place, ((arguments, keywords, values), result) in enumerate(zip(sent_calls, sent, strict=True)):
            lacking = self._lacking
            named = dict(zip(keywords, self._all(values, [], name), strict=True))
            call = Call(tuple(self._all(arguments, [], name)), named)
            key = cache.key_of(call) if self._lacking == lacking else None
            item = self._decode(result, existing.get(key, MISSING), f"{name}[{place}]")
            if self._lacking == lacking:  # else it would be what another call returns
                entries.append((key, item))
        is_same = len(was) == len(entries) and all(
            one == other and existing[one] is result for (one, _), (other, result) in zip(was, entries, strict=True)
        )
        if not is_same:
            cache.put_back(entries)
        return current

    def _iterator(self, number: int, content: list[Any], current: Any, name: str) -> Any:
        function, sent, state = content
        existing = list(reduced(current)[1]) if kind_of(current) is Kind.ITERATOR else []
        arguments = self._all(sent, existing if len(existing) == len(sent) else [], name)
        return iterator_of(_ITERATORS[function], arguments, self._decode(state, MISSING, name))

    def _view(self, number: int, content: list[Any], current: Any, name: str) -> Any:
        anchor, offset, shape, stride, dtype = content
        owner = self.anchored.get(anchor)
        if owner is None or str(owner.dtype)[6:] != dtype:
            self._lacks(name, f"it is a part of {anchor}, which is not there in this replacement")
            return current
        part = torch.as_strided(plain_of(owner), shape, stride, offset)
        if isinstance(current, Tensor) and not isinstance(current, nn.Parameter):
            set_local(current, part)
            return current
        return part

    def _view_of_an_array(self, number: int, content: list[Any], current: Any, name: str) -> Any:
        anchor, offset, dtype, shape, strides = content
        owner = self.anchored.get(anchor)
        if not isinstance(owner, Tensor):
            self._lacks(name, f"it is a part of {anchor}, which is not there in this replacement")
            return current
        part = array_over(plain_of(owner), offset, dtype, shape, strides)
        is_there = isinstance(current, np.ndarray) and current.__array_interface__ == part.__array_interface__
        return current if is_there else part

    def _random(self, number: int, content: list[Any], current: Any, name: str) -> Any:
        state, *bits = content
        for sent in bits:
            drawn_from = MISSING if current is MISSING else bits_of(current)
            shared = self._decode(sent, MISSING if drawn_from is None else drawn_from, name)
            if isinstance(shared, np.random.BitGenerator):
                return current if shared is drawn_from else np.random.Generator(shared)
        return generator_of(_state_of_plain(state), None if current is MISSING else current)

    def _bytes(self, number: int, content: list[Any], current: Any, name: str) -> Any:
        code, values = content
        made: Any = array.array(code, values) if code else bytearray(values)
        if type(current) is type(made):
            current[:] = made
            return current
        return made

    def _memory(self, number: int, content: list[Any], current: Any, name: str) -> Any:
        cls, values = content
        if not _is_a(current, cls):
            self._lacks(name, f"a {cls} cannot be made in a replacement")
        else:
            fill_memory(current, values)
        return current

    def _stream(self, number: int, content: list[Any], current: Any, name: str) -> Any:
        values, place = content
        made = io.StringIO() if isinstance(values, str) else io.BytesIO()
        made = current if isinstance(current, type(made)) and not current.closed else made
        fill_stream(made, values, place)
        return made

    def _cell(self, number: int, content: list[Any], current: Any, name: str) -> Any:
        if current is not MISSING and content:
            set_content(current, self._decode(content[0], content_of(current), name))
        return current

    def _mapping_view(self, number: int, content: list[Any], current: Any, name: str) -> Any:
        cls, sent = content
        is_there = type(current) in VIEWS and type(current).__name__ == cls
        existing = mapping_of(current) if is_there else MISSING
        mapping = self._decode(sent, existing, f"{name}.mapping")
        return current if is_there and mapping is existing else _VIEWS[cls](mapping)

    def _list(self, number: int, content: list[Any], current: Any, name: str) -> Any:
        cls, sent, maxlen = content
        return self._listed(number, cls, [sent], maxlen, current, name)

    def _segmented(self, number: int, content: list[Any], current: Any, name: str) -> Any:
        cls, parts, maxlen = content
        return self._listed(number, cls, parts, maxlen, current, name)

    def _listed(self, number: int, cls: str, parts: list[Any], maxlen: int | None, current: Any, name: str) -> Any:
        """Return a list or a deque. A part of it is a list of encoded items, or the first number of a segment."""
        fits = _is_a(current, cls) and getattr(current, "maxlen", None) == maxlen
        made = current if fits else _new(cls, deque(maxlen=maxlen) if cls.endswith(":deque") else [])
        if made is None:
            self._lacks(name, f"a {cls} cannot be made in a replacement")
            return current
        self._keep(number, made)
        existing = list(base_of(made).__iter__(made))
        length = sum(len(part if isinstance(part, list) else self._segments[part]) for part in parts)
        existing = existing if len(existing) == length else []
        items: list[Any] = []
        for part in parts:
            if isinstance(part, list):
                items += self._all(part, existing[len(items) : len(items) + len(part)], name)
            else:
                items += self._segments[part]
        if isinstance(made, deque):
            deque.clear(made)
            deque.extend(made, items)
        else:
            list.__setitem__(made, slice(None), items)
        return made

    def _dict(self, number: int, content: list[Any], current: Any, name: str) -> Any:
        cls, sent_keys, sent, *factory = content
        return self._entries(number, cls, [[sent_keys, sent]], factory, current, name)

    def _segmented_dict(self, number: int, content: list[Any], current: Any, name: str) -> Any:
        cls, parts, *factory = content
        return self._entries(number, cls, parts, factory, current, name)

    def _entries(self, number: int, cls: str, parts: list[Any], factory: list[Any], current: Any, name: str) -> Any:
        """Return a dict. A part of it is a list of encoded keys and one of items, or the first number of a segment."""
        made = current if _is_a(current, cls) else _new(cls, {})
        if made is None:
            self._lacks(name, f"a {cls} cannot be made in a replacement")
            return current
        self._keep(number, made)
        for sent in factory:
            now = made.default_factory
            found = self._decode(sent, MISSING if now is None else now, f"{name}.default_factory")
            made.default_factory = None if found is MISSING else found
        base = base_of(made)
        known = dict(base.items(made))
        pairs: list[Any] = []
        for part in parts:
            if isinstance(part, int):
                pairs += self._segments[part]
                continue
            keys = self._all(part[0], [], name)
            pairs += [
                (key, self._decode(each, known.get(key, MISSING), f"{name}[{key!r}]"))
                for key, each in zip(keys, part[1], strict=True)
            ]
        base.clear(made)
        for key, item in pairs:
            if item is not MISSING:
                base.__setitem__(made, key, item)
        return made

    def _set(self, number: int, content: list[Any], current: Any, name: str) -> Any:
        cls, sent, *table = content
        made = current if _is_a(current, cls) else _new(cls, set())
        if made is None:
            self._lacks(name, f"a {cls} cannot be made in a replacement")
            return current
        members = self._all(sent, [], name)
        length, pops = table or (0, False)  # an earlier version wrote nothing of it
        if why := refill(made, members, length, pops):
            self._lacks(name, why)
        return made

    def _tuple(self, number: int, content: list[Any], current: Any, name: str) -> Any:
        cls, sent, *made_class = content
        existing = list(tuple.__iter__(current)) if isinstance(current, tuple) else []
        existing = existing if len(existing) == len(sent) else []
        items = self._all(sent, existing, name)
        if existing and all(a is b for a, b in zip(items, existing, strict=True)):
            return current
        return self._fixed(cls, made_class, tuple, items, name)

    def _frozenset(self, number: int, content: list[Any], current: Any, name: str) -> Any:
        cls, sent, *made_class = content
        return self._fixed(cls, made_class, frozenset, self._all(sent, [], name), name)

    def _fixed(self, cls: str, made_class: list[Any], base: type, items: list[Any], name: str) -> Any:
        made: Any = _class_named(cls)
        for sent in made_class:
            made = self._decode(sent, MISSING, name)
        if isinstance(made, type) and issubclass(made, base):
            return fixed_of(made, items)
        self._lacks(name, f"a {cls} cannot be made in a replacement, so it is a {base.__name__} there")
        return base(items)

    def _object(self, number: int, content: list[Any], current: Any, name: str) -> Any:
        cls, pairs = content
        made = current if _is_a(current, cls) else _new(cls, None)
        if made is None:
            self._lacks(name, f"a {cls} cannot be made in a replacement")
            return current
        return self._with_attributes(number, made, pairs, name)

    def _rebuilt(self, number: int, content: list[Any], current: Any, name: str) -> Any:
        cls, maker, *sent = content
        existing = parts_of(current) if _is_a(current, cls) and kind_of(current) is Kind.REBUILT else None
        function = _maker_named(maker, cls, existing)
        targets = (MISSING, MISSING) if existing is None else existing[1:]
        made = tuple(self._part(*both, name) for both in zip(sent, targets, strict=True))
        if function is None or not _are_safe(made, existing):
            self._lacks(name, f"a {cls} cannot be made in a replacement")
            return current
        if existing is not None and has_parts(current, Parts(function, *made)):
            return current
        return rebuilt(function, *made)

    def _part(self, sent: list[Any], existing: Any, name: str) -> Any:
        kind, content, *more = sent
        if kind == "":
            found = self._decode(content, existing, name)
            return None if found is MISSING else found
        if kind == "dict":
            known = existing if type(existing) is dict else {}
            pairs = zip(self._all(content, [], name), more[0], strict=True)
            return {key: self._part(each, known.get(key, MISSING), name) for key, each in pairs}
        fits = type(existing) in (tuple, list) and len(existing) == len(content)
        targets = existing if fits else [MISSING] * len(content)
        made = [self._part(each, now, name) for each, now in zip(content, targets, strict=True)]
        return tuple(made) if kind == "tuple" else made

    def _with_attributes(self, number: int, made: Any, pairs: list[Any], name: str) -> Any:
        self._keep(number, made)
        self._set_attributes(made, pairs, name)
        return made

    def _value(self, number: int, content: list[Any], current: Any, name: str) -> Any:
        cls, sent, pairs = content
        value = self._decode(sent, MISSING, name)
        made = current if _is_a(current, cls) and is_same_atom(value_of(current), value) else _with_value(cls, value)
        if made is None:
            self._lacks(name, f"a {cls} cannot be made in a replacement")
            return current
        return self._with_attributes(number, made, pairs, name)

    def _set_attributes(self, made: Any, pairs: list[Any], name: str) -> None:
        wanted = {attribute for attribute, _ in pairs}
        attributes = vars(made) if has_attributes(made) else {}
        for attribute in [each for each in attributes if each not in wanted]:
            del attributes[attribute]
        slots = dict(zip(slots_of(type(made)), slot_values(made), strict=True))
        if isinstance(made, Tensor) and made.is_leaf:
            if GRADIENT not in wanted:
                made.grad = None
            slots |= {GRADIENT: made.grad, REQUIRES_GRAD: made.requires_grad}
        for attribute, each in pairs:
            # Never what its class has of that name: a default that all objects share, a property that runs code.
            now = attributes.get(attribute, slots.get(attribute, MISSING))
            value = self._decode(each, now, f"{name}.{attribute}")
            if value is MISSING:
                continue
            if attribute in slots and attribute not in attributes:
                if value is now:  # to set a field of an exception says that it was given
                    continue
                if isinstance(made, Tensor):
                    set_attribute(made, attribute, value)
                else:
                    slot_of(made, attribute).__set__(made, value)
            else:
                attributes[attribute] = value
        order = [attribute for attribute, _ in pairs if attribute in attributes]
        if order != [*attributes]:  # code that iterates them sees it
            for attribute in order:
                attributes[attribute] = attributes.pop(attribute)


def _is_its_own_dict(value: Any) -> bool:
    """Return whether the attributes of a dict are its entries (``self.__dict__ = self``)."""
    return isinstance(value, dict) and has_attributes(value) and vars(value) is value


def _encode_odd(value: int | str) -> list[Any]:
    if isinstance(value, int):
        return ["integer", f"{value:x}"]
    return ["surrogates", value.encode("utf-8", "surrogatepass")]


def _encode_atom(value: Any) -> Any:
    if isinstance(value, torch.Size):
        return ["size", list(value)]
    if type(value) is complex:
        return ["complex", value.real, value.imag]
    if isinstance(value, torch.dtype):
        return ["dtype", str(value)[6:]]
    if isinstance(value, torch.device):
        return ["device", str(value)]
    if isinstance(value, range):
        return ["range", value.start, value.stop, value.step]
    if isinstance(value, np.dtype) and value.names is None and (value.kind == "O" or not value.hasobject):
        return ["type of array", value.str]
    if isinstance(value, np.generic) and value.dtype.kind in "biufcmMSU" and type(value) is value.dtype.type:
        return ["number", value.dtype.str, value.tobytes()]
    if isinstance(value, enum.Enum) and value.name is not None:
        return ["enum", _class_of(value), value.name]
    if type(value).__name__ in _PATHS:
        return ["path", type(value).__name__, str(value)]
    if isinstance(value, type):
        return ["class", _name_of(value), _parts_of_class(value)]
    if type(value) in _AS_TEXT and not _has_zone(value):
        return ["text", type(value).__name__, _AS_TEXT[type(value)][0](value)]
    if type(value) is datetime.timedelta:
        return ["duration", value.days, value.seconds, value.microseconds]
    if isinstance(value, slice):
        ends = [value.start, value.stop, value.step]
        if all(type(end) in ATOMS for end in ends):
            return ["slice", *ends]
    if isinstance(value, re.Pattern):
        return ["pattern", value.pattern, value.flags]
    # The other process can tell whether it has the same.
    return ["~", describe(value), repr(value)]


def _has_zone(value: Any) -> bool:
    """Return whether a time depends on a table of time zones, which its text does not name."""
    zone, fold = getattr(value, "tzinfo", None), getattr(value, "fold", 0)
    return fold != 0 or not isinstance(zone, (datetime.timezone, type(None)))


def _dtype_named(name: str) -> torch.dtype:
    found = getattr(torch, name, None)
    if not isinstance(found, torch.dtype):
        raise TransferError(f"{name!r} is not a dtype.")
    return found


def _member_named(cls: str, name: str) -> Any:
    found = _class_named(cls)
    if found is None or not issubclass(found, enum.Enum):
        raise TransferError(f"{cls!r} is no enumeration of this process.")
    return found[name]


def title_of(function: Any) -> str:
    """Return what tells a function from others, in every process: its module and its name, and a digest of its code.

    Two lambdas of one line have the same name, as have two functions that one function has made.
    """
    inner = getattr(function, "__func__", function)
    code = getattr(inner, "__code__", None)
    name = f"{getattr(inner, '__module__', None) or ''}:{getattr(inner, '__qualname__', describe(inner))}"
    return name if code is None else f"{name}:{_digest_of(code)}"


@functools.lru_cache(maxsize=10_000)
def _digest_of(code: types.CodeType) -> str:
    """Return a digest of what code does; a set among its constants has another order in each process."""
    constants = [
        _digest_of(each)
        if isinstance(each, types.CodeType)
        else repr(sorted(map(repr, each)) if isinstance(each, frozenset) else each)
        for each in code.co_consts
    ]
    parts = (code.co_code, repr((code.co_names, code.co_varnames, code.co_freevars, constants)).encode())
    return hashlib.blake2s(b"".join(parts), digest_size=6).hexdigest()


def _qualname_in(title: str) -> str:
    """Return the name in what `title_of` has returned."""
    return title.split(":")[1]


def _class_of(value: Any) -> str:
    return _name_of(type(value))


def _name_of(cls: type) -> str:
    return f"{cls.__module__}:{cls.__qualname__}"


def _made_class_of(value: Any) -> list[Any]:
    """Return what is sent for the class of a value if a script has made it while it ran; nothing for all others."""
    return [] if _class_named(_class_of(value)) is type(value) else [_encode_atom(type(value))]


def _parts_of_class(cls: type) -> Any:
    """Return what a class consists of that was made while the script ran; None if it has a body.

    Its fields for one of `collections.namedtuple`; its bases, with their parts, for a subclass without a body.
    """
    if _class_named(_name_of(cls)) is cls:
        return None
    fields = getattr(cls, "_fields", None)
    if cls.__bases__ == (tuple,) and isinstance(fields, tuple) and not getattr(cls, "_field_defaults", None):
        return ["fields", list(fields)]
    if type(cls) is not type or not _EMPTY_BODY.issuperset(vars(cls)):
        return None
    return ["bases", [[_name_of(base), _parts_of_class(base)] for base in cls.__bases__]]


def _class_of_parts(title: str, parts: Any) -> type | None:
    """Make a class of what `_parts_of_class` has returned; None if a base is not known, or would run code for that."""
    module, _, path = title.partition(":")
    named = path.rpartition(".")[2]
    if parts is None:
        return None
    if parts[0] == "fields":
        made: type = collections.namedtuple(named, parts[1], module=module)  # type: ignore[misc]
        made.__qualname__ = path
        return made
    bases = [_class_named(name) or _class_of_parts(name, inner) for name, inner in parts[1]]
    if any(base is None or type(base) is not type or _customizes_subclasses(base) for base in bases):
        return None
    return type(named, tuple(bases), {"__module__": module, "__qualname__": path})  # type: ignore[arg-type]


def _customizes_subclasses(base: type) -> bool:
    return any("__init_subclass__" in vars(each) for each in base.__mro__[:-1])


def _source_of(function: Any) -> str:
    """Return the name by which other processes find a function, or that of a method; "" if they cannot."""
    function = getattr(function, "__func__", function)
    owner = getattr(function, "__self__", None)  # of a builtin function: its module
    module = getattr(function, "__module__", None) or getattr(owner, "__name__", None)
    name = f"{module}:{getattr(function, '__qualname__', '')}"
    return name if _function_named(name) is function else ""


def _is_of_its_class(value: Any) -> bool:
    """Return whether a static method, a class method or a property is what a class statement has put there."""
    function = wrapped_in(value)
    path = str(getattr(function, "__qualname__", ""))
    owner = _class_named(f"{getattr(function, '__module__', '')}:{path.rpartition('.')[0]}")
    return owner is not None and vars(owner).get(path.rpartition(".")[2]) is value


def _function_named(name: str) -> Any:
    """Return a function that this process has imported already; None if there is none of that name."""
    found = _named(name)
    return found if isinstance(found, (types.FunctionType, types.BuiltinFunctionType)) else None


def _class_named(name: str) -> Any:
    """Return a class that this process has imported already; None if there is none of that name."""
    found = _named(name)
    return found if isinstance(found, type) else None


def _named(name: str) -> Any:
    module, _, path = name.partition(":")
    found: Any = sys.modules.get(module)
    for part in path.split("."):
        found = getattr(found, part, None)
    return found


def _name_of_maker(function: Any) -> str:
    return f"{getattr(function, '__module__', '')}:{getattr(function, '__qualname__', '')}"


def _maker_named(name: str, cls: str, existing: Parts | None) -> Any:
    """Return what makes an object in C; None if it might do anything else.

    It is what an object of that class that is there names, or one of pandas' that are known to make objects only.
    """
    if existing is not None and _name_of_maker(existing.function) == name:
        return existing.function
    made = _class_named(cls)
    if name == cls and made is not None and derives_attributes(made):
        return made
    return _named(name) if _MAKERS.fullmatch(name) else None


def _are_safe(parts: tuple[Any, Any], existing: Parts | None) -> bool:
    """Return whether what makes an object in C gets no other classes and functions than for the object that is there.

    `copyreg.__newobj__` makes an object of any class. Where no object is there, classes of pandas that consist of such
    parts are known to do nothing else.
    """
    known = [] if existing is None else [id(each) for _, each in leaves_of(existing) if callable(each)]
    made = [each for _, each in leaves_of(Parts(_nothing, *parts)) if callable(each)]
    return all(id(each) in known or (isinstance(each, type) and derives_attributes(each)) for each in made)


def _nothing() -> None:
    """What a partial refers to until its function has been decoded."""


def _is_a(value: Any, cls: str) -> bool:
    return value is not MISSING and _class_of(value) == cls


def _new(cls: str, empty: Any) -> Any:
    """Return an empty object of a class, without calling its ``__init__``; None if that is not possible."""
    if empty is not None and _class_of(empty) == cls:
        return empty
    found = _class_named(cls)
    if found is None or (empty is None and kind_of_class(found) is not Kind.OBJECT):
        return None
    if empty is not None and not issubclass(found, type(empty)):
        return None
    # The class that decides over the memory: `object`, or one in C as `types.SimpleNamespace`.
    base: Any = next(each for each in found.__mro__ if not is_made_in_python(each))
    try:
        return base.__new__(found)
    except TypeError:
        return None


def _with_value(cls: str, value: Any) -> Any:
    """Return a number or a text of a class, without calling code of that class; None if that is not possible."""
    found = _class_named(cls)
    base: Any = type(value)
    return base.__new__(found, value) if found is not None and issubclass(found, base) else None


def _state_to_plain(state: Any) -> Any:
    if isinstance(state, np.ndarray):
        return ["array", torch.from_numpy(state.copy())]
    if isinstance(state, tuple):
        return ["tuple", [_state_to_plain(each) for each in state]]
    if isinstance(state, dict):
        return ["dict", [[key, _state_to_plain(each)] for key, each in state.items()]]
    return state


def _state_of_plain(sent: Any) -> Any:
    if not isinstance(sent, list):
        return sent
    kind, content = sent
    if kind == "array":
        return content.numpy()
    if kind == "tuple":
        return tuple(map(_state_of_plain, content))
    return {key: _state_of_plain(each) for key, each in content}


_READERS: Final[Mapping[str, Callable[[Decoder, int, list[Any], Any, str], Any]]] = {
    "array": Decoder._array,
    "bits": Decoder._bits,
    "objects": Decoder._objects,
    "sparse": Decoder._sparse,
    "bytes": Decoder._bytes,
    "cache": Decoder._cache,
    "cell": Decoder._cell,
    "compressed": Decoder._compressed,
    "deque": Decoder._list,
    "dict": Decoder._dict,
    "frozenset": Decoder._frozenset,
    "function": Decoder._function,
    "iterator": Decoder._iterator,
    "list": Decoder._list,
    "mapping view": Decoder._mapping_view,
    "memory": Decoder._memory,
    "object": Decoder._object,
    "random": Decoder._random,
    "rebuilt": Decoder._rebuilt,
    "script": Decoder._script,
    "segmented": Decoder._segmented,
    "segmented dict": Decoder._segmented_dict,
    "set": Decoder._set,
    "stream": Decoder._stream,
    "tensor": Decoder._tensor,
    "tuple": Decoder._tuple,
    "value": Decoder._value,
    "view": Decoder._view,
    "view of an array": Decoder._view_of_an_array,
    "with": Decoder._with,
}
_MAKERS: Final = re.compile(
    r"pandas\._libs\.(internals:_unpickle_block|\w+:__pyx_unpickle_\w+)|pandas\.core\.indexes\.\w+:_new_\w+"
)
_OF_DEQUES: Final[tuple[Any, ...]] = (type(iter(deque())), type(reversed(deque())))
_BUILT_IN: Final[tuple[Any, ...]] = (iter, enumerate, zip, map, filter, reversed, *_OF_DEQUES, *ITERTOOLS)
_ITERATORS: Final[Mapping[str, Callable[..., Any]]] = {each.__name__: each for each in _BUILT_IN}
_VIEWS: Final = {cls.__name__: make for cls, make in VIEWS.items()}
_PATHS: Final[Mapping[str, Any]] = {
    each.__name__: each for each in (PosixPath, PurePosixPath, WindowsPath, PureWindowsPath)
}
_ATOMS: Final[Mapping[str, Callable[..., Any]]] = {
    "complex": complex,
    "integer": lambda digits: int(digits, 16),
    "surrogates": lambda data: data.decode("utf-8", "surrogatepass"),
    "device": torch.device,
    "dtype": _dtype_named,
    "range": range,
    "size": torch.Size,
    "number": lambda dtype, data: np.frombuffer(data, dtype=np.dtype(dtype))[0],
    "enum": _member_named,
    "path": lambda name, text: _PATHS[name](text),
    "text": lambda name, text: {each.__name__: of for each, (_, of) in _AS_TEXT.items()}[name](text),
    "duration": datetime.timedelta,
    "type of array": np.dtype,
    "pattern": re.compile,
    "slice": slice,
}
