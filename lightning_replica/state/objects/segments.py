"""Lists and dicts that grow: items that are alike are encoded once, many at a time.

A list of losses or of outputs gets an item in each step, and a cache one for each sample. To encode all of it each time
would take longer and longer. So items that are new since training began and alike (the same containers around tensors
of the same shapes) are encoded in segments: all first leaves as one tensor, all second leaves as another, and so on. A
segment is sent as the same bytes again and again, as long as nothing in it changes.

The objects in a segment have numbers that stay. So what refers to them elsewhere refers to them in the other process.
"""

import operator
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain
from types import MappingProxyType
from typing import Any, Final, TypeAlias

import numpy as np
import torch
from torch import Tensor

from lightning_replica.core import plain
from lightning_replica.errors import TransferError
from lightning_replica.state.atoms import ATOMS, is_plain_atom
from lightning_replica.state.objects.capture import Anchors, Capture, Content
from lightning_replica.state.objects.contents import Copy, is_content
from lightning_replica.state.objects.records import Entries, Fixed, Items, Record
from lightning_replica.state.objects.shared_memory import OwnedMemory, is_of_array

SEGMENT_ITEMS: Final = 32
_FIRST_NUMBER: Final = 1 << 40  # behind all numbers that an `Encoder` gives
_NEAR: Final = 4 * SEGMENT_ITEMS  # rows before a segment that are not in one
_DEEP: Final = 8
_NUMBERS: Final = "biufc"  # kinds of NumPy's numbers
_ATOM, _NUMBER, _TENSOR, _LIST, _TUPLE, _DICT = "atom", "number", "tensor", "list", "tuple", "dict"
_ENTRY: Final = "entry"

Outline: TypeAlias = list[Any]
"""How a row is built: an item of a list, or a key and an item of a dict.

``[_ATOM]``, ``[_NUMBER, dtype]``, ``[_TENSOR, dtype, shape, device]``, ``[_LIST or _TUPLE, outlines]``,
``[_DICT, keys, outlines]`` or ``[_ENTRY, outlines]``.
"""


class BrokenUpError(Exception):
    """A segment is gone that what has been encoded may refer to."""


class _UnlikeError(Exception):
    """Items cannot be in one segment."""


@dataclass(frozen=True, eq=False)
class Segment:
    """Rows of a list or a dict that are encoded together.

    Attributes:
        flat: The items; of a dict, the keys too, each before its item.
        first: The number of the first object in it.
        objects: The objects in it that others can refer to, in the order of their numbers.
        records: What each of them held; None for a tensor that has a copy instead.
        copies: What tensors held; None for other objects, and for those with a record.
        addresses: Where the memory of tensors lies.
        sent: What is sent: the first number, how many rows there are, the outline of each, and the leaves.
    """

    flat: Sequence[Any]
    first: int
    objects: Sequence[Any]
    records: Sequence[Record | None]
    copies: Sequence[Copy]
    addresses: Sequence[int]
    sent: bytes
    keys: Sequence[int] = field(init=False)
    inverted: Sequence[int] = field(init=False)  # the keys of records of attributes
    tensors: Sequence[Tensor] = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "keys", [id(each) for each in self.objects])
        object.__setattr__(self, "inverted", [~key for key in self.keys])
        object.__setattr__(self, "tensors", [each for each in self.objects if isinstance(each, Tensor)])

    def is_same(self, records: Mapping[int, Record], copies: Mapping[int, Copy]) -> bool:
        """Return whether all objects hold what they held, and have got no attributes."""
        return (
            all(map(operator.is_, map(records.get, self.keys), self.records))
            and all(map(operator.is_, map(copies.get, self.keys), self.copies))
            and not any(map(records.__contains__, self.inverted))
            and list(map(Tensor.data_ptr, self.tensors)) == self.addresses
        )

    def is_at(self, flat: Sequence[Any], place: int) -> bool:
        """Return whether a list or a dict has the rows from ``flat[place]`` on."""
        rows = flat[place : place + len(self.flat)]
        return len(rows) == len(self.flat) and all(map(operator.is_, rows, self.flat))


Part: TypeAlias = "Segment | range"
"""A part of a list or a dict: a segment, or the places of rows that are encoded one by one."""


class Segments:
    """Divides lists and dicts into segments, and keeps these as long as they are the same.

    Attributes:
        numbers: By ``id`` of an object in a segment, its number and the segment.
    """

    def __init__(self) -> None:
        self.numbers: dict[int, tuple[int, Segment]] = {}
        self._owned: dict[int, Tensor] = {}  # by the address of their memory
        self._key_at: dict[int, int] = {}  # likewise, the container that they are in
        self._memory = OwnedMemory(self._owned)
        self._may_divide = False
        self._next = _FIRST_NUMBER
        self._of: dict[int, tuple[Any, list[Segment]]] = {}  # by key of a container; with it, so that it stays
        self._unfit: dict[int, Any] = {}  # tensors that share memory with something else, by ``id``
        self._divided: dict[int, list[Part]] = {}
        self._capture, self._anchors = Capture(), Anchors({})
        self._copies: Mapping[int, Copy] = MappingProxyType({})
        self._names: Mapping[int, str] = MappingProxyType({})
        self._owners: Mapping[int, Any] = MappingProxyType({})

    def begin(
        self,
        capture: Capture,
        copies: Mapping[int, Copy],
        anchors: Anchors,
        names: Mapping[int, str],
        owners: Mapping[int, Any],
    ) -> None:
        """Keep the segments that are as they were.

        Args:
            capture: What is reachable.
            copies: What tensors and arrays held, by ``id``.
            anchors: What has a name in every process.
            names: The names that objects had when training began, by ``id``.
            owners: The tensors and arrays that there were then, by the address of their memory.
        """
        if anchors is not self._anchors or names is not self._names:
            self._of, self.numbers = {}, {}
            self._owned.clear()
            self._key_at.clear()
            self._memory.changed()
        self._capture, self._copies, self._anchors = capture, copies, anchors
        self._names, self._owners, self._divided, self._may_divide = names, owners, {}, True
        records = capture.records
        for key, (value, known) in [*self._of.items()]:
            is_there = _is_of(records.get(key), value)
            self._drop(key, [each for each in known if not is_there or not each.is_same(records, copies)])
        self._unfit = {key: value for key, value in self._unfit.items() if key in records or key in copies}

    def parts_of(self, record: Record | None) -> list[Part] | None:
        """Return the parts of a list, a deque or a dict; None if it is short, or something else."""
        if not isinstance(record, Entries) and type(record) is not Items:
            return None
        key = id(record.value)
        is_long = len(record.items) >= 2 * SEGMENT_ITEMS or key in self._of
        if self._may_divide and is_long and key not in self._divided:
            self._divided[key] = self._divide(key, record)
        return self._divided.get(key)

    def divide_no_more(self) -> None:
        """Keep all segments until `begin`, and make no others: what is encoded now refers to them by number."""
        self._may_divide = False

    def leave_memory_of(self, value: Any) -> None:
        """Check that a tensor or an array, which is encoded by itself, shares no memory with a tensor in a segment.

        Raises:
            BrokenUpError: If it does. The tensor in the segment is encoded by itself from then on.
        """
        address = self._memory.address_of(value)
        if address:
            key, tensor = self._key_at[address], self._owned[address]
            self._unfit[id(tensor)] = tensor
            (broken,) = (each for each in self._of[key][1] if address in each.addresses)
            self._drop(key, [broken])
            raise BrokenUpError

    def _divide(self, key: int, record: Items | Entries) -> list[Part]:
        parts: list[Part] = []
        value, flat, width = record.value, _flat(record), 1 if isinstance(record, Items) else 2
        _, known = self._of.pop(key, (None, []))
        count, start = len(record.items), 0
        for segment in known:
            place = self._find(segment, flat, width, start)
            if place is None:
                self._forget(segment)
                continue
            parts += self._seal(key, value, flat, width, range(start, place))
            self._of.setdefault(key, (value, []))[1].append(segment)
            parts.append(segment)
            start = place + len(segment.flat) // width
        # Not the newest rows: for some steps, others refer to their memory, too.
        end = max(start, count - SEGMENT_ITEMS)
        parts += self._seal(key, value, flat, width, range(start, end))
        return [*parts, range(end, count)]

    def _find(self, segment: Segment, flat: Sequence[Any], width: int, start: int) -> int | None:
        """Return the place of the first row of a segment; None if it is not there any more.

        Rows before it may be gone, as in a deque, or be encoded one by one.
        """
        first = segment.flat[0]
        for place in range(start, min(start + _NEAR, len(flat) // width)):
            if flat[place * width] is first and segment.is_at(flat, place * width):
                return place
        return None

    def _seal(self, key: int, value: Any, flat: Sequence[Any], width: int, rows: range) -> list[Part]:
        """Make segments of some rows. What is left over has one of its own if it is long enough the next time."""
        parts, start = list[Part](), rows.start
        for place in range(rows.start, rows.stop - SEGMENT_ITEMS + 1, SEGMENT_ITEMS):
            start = place + SEGMENT_ITEMS
            try:
                segment = self._encode(flat[place * width : start * width], width)
            except _UnlikeError:
                parts.append(range(place, start))
                continue
            self._of.setdefault(key, (value, []))[1].append(segment)
            self._learn(key, segment)
            parts.append(segment)
        return [*parts, range(start, rows.stop)] if start < rows.stop else parts

    def _learn(self, key: int, segment: Segment) -> None:
        self.numbers |= {each: (segment.first + n, segment) for n, each in enumerate(segment.keys)}
        self._owned.update(zip(segment.addresses, segment.tensors, strict=True))
        self._key_at.update(dict.fromkeys(segment.addresses, key))
        self._memory.changed()
        self._next += len(segment.keys) + 1  # one of numbers and texts alone has a number, too

    def _drop(self, key: int, segments: Sequence[Segment]) -> None:
        for segment in segments:
            self._forget(segment)
        value, known = self._of.pop(key)
        if left := [each for each in known if each not in segments]:
            self._of[key] = value, left

    def _forget(self, segment: Segment) -> None:
        for each in segment.keys:
            del self.numbers[each]
        for address in segment.addresses:
            del self._owned[address], self._key_at[address]
        self._memory.changed()

    def _encode(self, flat: Sequence[Any], width: int) -> Segment:
        """Encode rows.

        Raises:
            _UnlikeError: If they are not alike, or if something in them is not new or cannot be in a segment.
        """
        objects: list[Any] = []
        addresses: dict[int, None] = {}
        rows: list[list[Any]] = []
        outline: Outline | None = None
        for place in range(0, len(flat), width):
            rows.append([])
            inner = [self._outline(each, rows[-1], objects, addresses, 0) for each in flat[place : place + width]]
            if width == 2 and inner[0] != [_ATOM]:
                raise _UnlikeError
            own = inner[0] if width == 1 else [_ENTRY, inner]
            if outline is not None and own != outline:
                raise _UnlikeError
            outline = own
        if len({*map(id, objects)}) < len(objects):
            raise _UnlikeError
        keys = [*map(id, objects)]
        try:
            columns = [_column(each) for each in zip(*rows, strict=True)]
            sent = plain.pack([self._next, len(rows), outline, columns])
        except Exception as error:  # torch stacks no tensors of some types
            raise _UnlikeError from error
        return Segment(
            flat,
            self._next,
            objects,
            [*map(self._capture.records.get, keys)],
            [*map(self._copies.get, keys)],
            [*addresses],
            sent,
        )

    def _outline(
        self, value: Any, leaves: list[Any], objects: list[Any], addresses: dict[int, None], depth: int
    ) -> Outline:
        if type(value) in ATOMS and is_plain_atom(value):
            leaves.append(value)
            return [_ATOM]
        if isinstance(value, np.generic) and value.dtype.kind in _NUMBERS:
            leaves.append(value)
            return [_NUMBER, value.dtype.str]
        key, record = id(value), self._capture.records.get(id(value))
        barred = (self._names, self._anchors.names, self.numbers, self._unfit)
        if any(key in each for each in barred) or ~key in self._capture.records or depth > _DEEP:
            raise _UnlikeError
        objects.append(value)
        if type(value) is Tensor:
            return self._outline_of_tensor(value, record, leaves, addresses)
        if type(value) is dict and isinstance(record, Entries) and all(map(_is_plain_text, record.keys)):
            inner = [self._outline(each, leaves, objects, addresses, depth + 1) for each in record.items]
            return [_DICT, list(record.keys), inner]
        if type(value) is tuple and (record is None or isinstance(record, Fixed)):
            return [_TUPLE, [self._outline(each, leaves, objects, addresses, depth + 1) for each in value]]
        if type(value) is list and isinstance(record, Items):
            return [_LIST, [self._outline(each, leaves, objects, addresses, depth + 1) for each in record.items]]
        raise _UnlikeError

    def _outline_of_tensor(
        self, value: Tensor, record: Record | None, leaves: list[Any], addresses: dict[int, None]
    ) -> Outline:
        copy = record.copy if isinstance(record, Content) else self._copies.get(id(value)) if record is None else None
        if copy is None or not is_content(value) or value.requires_grad or not _owns_memory(value):
            raise _UnlikeError
        address = value.data_ptr()
        is_shared = any(address in each for each in (addresses, self._owned, self._owners))
        if not address or is_shared or self._anchors.has_memory_of(value):
            raise _UnlikeError
        addresses[address] = None
        leaves.append(copy)
        return [_TENSOR, str(copy.dtype)[6:], list(copy.shape), str(copy.device)]


def _owns_memory(tensor: Tensor) -> bool:
    """Return whether a tensor has all of its memory for itself, as far as it can know. That of an array it shares."""
    return not is_of_array(tensor) and tensor.untyped_storage().nbytes() == tensor.nbytes and tensor.is_contiguous()


def _is_plain_text(key: Any) -> bool:
    return type(key) is str and is_plain_atom(key)


def _flat(record: Items | Entries) -> Sequence[Any]:
    if isinstance(record, Items):
        return record.items
    return [*chain.from_iterable(zip(record.keys, record.items, strict=True))]


def _is_of(record: Record | None, value: Any) -> bool:
    return record is not None and record.value is value


def _column(leaves: Sequence[Any]) -> Any:
    """Return the same leaf of all items as one value that `plain.pack` accepts."""
    first = leaves[0]
    if isinstance(first, Tensor):
        return torch.stack(list(leaves))
    if isinstance(first, np.generic):
        return np.stack(leaves).tobytes()
    return list(leaves)


def rows_of(sent: bytes) -> tuple[int, list[Any], list[Any]]:
    """Make what a segment holds.

    Args:
        sent: What `Segment.sent` was.

    Returns:
        The first number, the rows, and all objects in the order of their numbers. A row of a dict is a key and an item.

    Raises:
        TransferError: If it was something else.
    """
    first, count, outline, columns = plain.unpack(sent, placed=True)
    objects: list[Any] = []
    return first, [_made(outline, row, iter(columns), objects) for row in range(count)], objects


def _made(outline: Outline, row: int, columns: Iterator[Any], objects: list[Any]) -> Any:
    kind, *rest = outline
    if kind == _ATOM:
        return next(columns)[row]
    if kind == _NUMBER:
        return np.frombuffer(next(columns), dtype=np.dtype(rest[0]))[row]
    if kind == _ENTRY:
        return tuple(_made(each, row, columns, objects) for each in rest[0])
    place = len(objects)
    objects.append(None)
    if kind == _TENSOR:
        made = next(columns)[row].clone()
    elif kind == _DICT:
        made = {key: _made(each, row, columns, objects) for key, each in zip(*rest, strict=True)}
    elif kind in (_LIST, _TUPLE):
        inner = [_made(each, row, columns, objects) for each in rest[0]]
        made = inner if kind == _LIST else tuple(inner)
    else:
        raise TransferError(f"A segment of a list has {kind!r} in it, which this version does not know.")
    objects[place] = made
    return made
