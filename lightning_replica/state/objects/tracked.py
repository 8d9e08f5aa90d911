"""Objects that are followed from one point to the next: what they hold, and what has changed since the beginning.

Both can be had as plain data for another process, which holds the same objects as they were in the beginning.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Set
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import chain, islice
from types import ModuleType
from typing import Any, Final, NamedTuple

from torch import Tensor

from lightning_replica.core.inexact import Report, Scope
from lightning_replica.state.atoms import ATOMS, is_same_atom
from lightning_replica.state.objects.capture import Anchors, Capture, Recorder, Root, why_unrestored
from lightning_replica.state.objects.contents import COPIED_BYTES
from lightning_replica.state.objects.kinds import Kind, kind_of
from lightning_replica.state.objects.records import Attributes, Entries, Items, Record, Slots, Unknown
from lightning_replica.state.objects.segments import BrokenUpError, Part, Segment, Segments
from lightning_replica.state.objects.shared_memory import address_of, is_writable
from lightning_replica.state.objects.wire import Decoder, Encoder


class Limits(NamedTuple):
    """How much an attribute may take to be sent.

    Attributes:
        large_bytes: More than this is too large.
        many: More objects than these, or more items in one container, are too many.
        why: What it means that an attribute is left out.
        scope: What that concerns.
        segments_bytes: More than this in segments is too large. A peer gets a segment once, so this may be more.
    """

    large_bytes: int
    many: int
    why: str
    scope: Scope
    segments_bytes: int = 0


MIRRORED: Final = Limits(
    4 * 2**20,
    1000,
    "it is too large to be mirrored in every step, so a replaced rank takes that of a peer",
    "replacement",
    64 * 2**20,
)
SAVED: Final = Limits(64 * 2**20, 200_000, "it is too large for a checkpoint", "resume")
# No root is called so:
LEFT_OUT: Final = ""  # its "attributes" are the names of what is too large
_SEGMENTS: Final = "#"  # its "attributes" are the segments of lists, which come first


@dataclass
class Taken:
    """What objects held at one point.

    Attributes:
        capture: All of it.
        anchors: What has a name in every process.
        changed: By name of a root, the attributes that are not as they were when following began.
    """

    capture: Capture = field(default_factory=Capture)
    anchors: Anchors = field(default_factory=lambda: Anchors({}))
    changed: dict[str, frozenset[str]] = field(default_factory=dict)


class Tracked:
    """Takes what objects hold, each time with what is the same of the time before.

    Args:
        report: Called with the name of something, and with why it is not restored after a fault.
        all_changed: Whether everything counts as changed, because another process may have begun with something else.
        copied_bytes: See `contents.Contents`.
    """

    def __init__(self, report: Report, all_changed: bool = False, copied_bytes: int = COPIED_BYTES) -> None:
        self._report, self._all_changed = report, all_changed
        self._recorder = Recorder(report, copied_bytes)
        self._first: Capture | None = None
        self._existing: Mapping[str, Any] = {}
        self._names: Mapping[int, str] = {}
        self._owners: dict[int, Any] = {}
        self._unsaved: Capture | None = None
        self._segments = Segments()
        self._last = Taken()

    def begin(self, roots: Sequence[Root], anchors: Anchors) -> None:
        """Count what objects hold now as unchanged; may be called again, with other roots."""
        self._recorder.restart()
        self._first = self._recorder.take(roots, anchors)
        self._recorder.touched.clear()
        self._existing = self._first.by_name()
        self._names = {id(value): name for name, value in self._existing.items()}
        held = (held.value for held, _ in self._first.copies if id(held.value) in self._names)
        self._owners = {address_of(value): value for value in sorted(filter(is_writable, held), key=_nbytes)}
        self._owners.pop(0, None)
        self._last = Taken()

    @property
    def classes(self) -> Iterable[type]:
        """The classes of all objects that were reachable in the beginning, and those that these refer to."""
        if self._first is None:
            return ()
        held = (child for _, child in self._first.children() if issubclass(type(child), type))
        return dict.fromkeys((*(type(record.value) for record in self._first.records.values()), *held))

    @property
    def modules(self) -> Iterator[ModuleType]:
        """The modules of Python that objects referred to in the beginning, as one that holds settings."""
        if self._first is not None:
            yield from (child for _, child in self._first.children() if type(child) is ModuleType)

    @property
    def functions(self) -> Iterator[Any]:
        """The functions that objects held in the beginning."""
        if self._first is not None:
            yield from self._first.functions()

    def values(self) -> Iterator[Any]:
        """Yield all objects, tensors and arrays that were reachable in the beginning."""
        if self._first is not None:
            yield from (record.value for record in self._first.records.values())
            yield from (held.value for held, _ in self._first.copies)

    def referred(self) -> set[int]:
        """Return the ``id`` of each object that another one referred to in the beginning."""
        return set() if self._first is None else {id(child) for _, child in self._first.children()}

    def take(self, roots: Sequence[Root], anchors: Anchors, window: bool = True, whole: bool = False) -> Taken:
        """Return what the objects hold now. The arguments are those of `Recorder.take`."""
        capture = self._recorder.take(roots, anchors, window, whole)
        if capture is not self._last.capture:
            touched, known = self._recorder.touched, _known(capture, anchors)
            changed = _changed(capture, self._first, self._all_changed, known, touched)
            self._last = Taken(capture, anchors, dict(changed))
        return self._last

    def put_back(self, taken: Taken) -> None:
        """Restore what `take` returned."""
        taken.capture.put_back(self._report)
        self._recorder.forget()

    def return_to_beginning(self) -> None:
        """Restore what the objects held in the beginning."""
        if self._first is not None:
            self._first.put_back(self._report)
            self._recorder.forget()

    def put_sent(self, roots: Iterable[Root], anchored: Iterable[tuple[str, Any]], sent: Iterable[Any]) -> None:
        """Put what another process has sent into the objects of this one.

        Args:
            roots: Where the walk begins here.
            anchored: What has a name, with the names.
            sent: What `encoded` has returned.
        """
        values, anchored = dict[str, Any](), list(anchored)
        for name, value in anchored:
            values.setdefault(name, value)
        sent, by_name = list(sent), {root.name: root.value for root in roots}
        first = Capture() if self._first is None else self._first
        known = _known(first, Anchors.of(anchored))
        decoder = Decoder(values, self._report, self._existing, frozenset(_elsewhere(first, sent, known)))
        for name, attributes in sent:
            if name == _SEGMENTS:
                decoder.make_segments(attributes)
            elif name in by_name:
                decoder.put_attributes(by_name[name], name, attributes)
            elif name != LEFT_OUT:
                self._report(name, "it is not there in this process, so what it held is lost", "once")
        self._recorder.forget()

    def begin_to_save(self, taken: Taken) -> None:
        """Leave out of `saved` what is now as in ``taken``: the same code will have run in a process that resumes."""
        self._unsaved = taken.capture

    def saved(self, taken: Taken) -> list[Any]:
        """Return what has changed since `begin_to_save`, as plain data; without what is large.

        Report objects in C that are not saved because nothing is known of what they hold.
        """
        self._report_unsaved(taken.capture)
        known = _known(taken.capture, taken.anchors)
        changed = dict(_changed(taken.capture, self._unsaved, False, known))
        return self.encoded(Taken(taken.capture, taken.anchors, changed), SAVED)

    def _report_unsaved(self, capture: Capture) -> None:
        """Report what a process that resumes makes anew, though it may hold something else here by now."""
        first = {} if self._first is None else self._first.records
        for key, record in capture.records.items():
            before = first.get(key)
            if isinstance(record, Unknown) and isinstance(before, Unknown) and record.value is before.value:
                why = why_unrestored(before)
                if why is not None:
                    self._report(record.name, f"{why[0]}, and no checkpoint holds it", "resume")

    def mirrored(self, taken: Taken) -> list[Any]:
        """Return what `encoded` does with the limits `MIRRORED`, and encode again only what has changed.

        The same state may be encoded in other ways from one time to the next.
        """
        while True:
            copies = taken.capture.copies_by_id()
            self._segments.begin(taken.capture, copies, taken.anchors, self._names, self._owners)
            with suppress(BrokenUpError):
                return self.encoded(taken, MIRRORED, self._segments)

    def encoded(self, taken: Taken, limits: Limits | None = None, segments: Segments | None = None) -> list[Any]:
        """Return what has changed since the beginning, as plain data.

        Args:
            taken: What the objects held.
            limits: What is larger is left out, and reported; None for no limits.
            segments: The segments of long lists and dicts; None if all items are encoded one by one.

        Raises:
            BrokenUpError: If something shares memory with an object in a segment. That segment is gone; call again.
        """
        segments = segments or Segments()
        known = _known(taken.capture, taken.anchors)
        sizes = _Sizes(taken.capture, limits, known, segments) if limits is not None else None
        wanted, left = list[tuple[Root, frozenset[str]]](), list[str]()
        for root in taken.capture.roots:
            names = taken.changed.get(root.name, frozenset())
            if names and sizes is not None:
                record = taken.capture.attributes_of(root)
                large = {name for name in names if sizes.is_large(record, name)}
                for name in large:
                    self._report(f"{root.name}.{name}", sizes.limits.why, sizes.limits.scope)
                names -= large
                left += [f"{root.name}.{name}" for name in sorted(large)]
            if names:
                wanted.append((root, names))
        segments.divide_no_more()
        encoder = Encoder(taken.capture, taken.anchors, self._report, self._first, self._names, self._owners, segments)
        sent = [[root.name, encoder.attributes(taken.capture.attributes_of(root), names)] for root, names in wanted]
        used = encoder.finish()
        return [*([[_SEGMENTS, used]] if used else []), *sent, *([[LEFT_OUT, left]] if left else [])]


def changed_between(before: Taken, after: Taken) -> dict[str, frozenset[str]]:
    """Return, by name of a root, the attributes that are not as they were."""
    if before is after:
        return {}
    return dict(_changed(after.capture, before.capture, False, _known(after.capture, after.anchors)))


def _nbytes(value: Any) -> int:
    return int(value.nbytes)


def _known(capture: Capture, anchors: Anchors) -> frozenset[int]:
    """Return the ``id`` of each object that has a name of its own. Who refers to it does not contain it."""
    return frozenset((*anchors.names, *(id(root.value) for root in capture.roots)))


def _elsewhere(first: Capture, sent: Sequence[Any], known: frozenset[int]) -> Iterator[int]:
    """Yield the ``id`` of each object that the attributes lead to which are not in ``sent``."""
    of_roots = (each for each in sent if each[0] not in (LEFT_OUT, _SEGMENTS))
    names = {root: {attribute for attribute, _ in pairs} for root, pairs in of_roots}
    for root in first.roots:
        for name, value in vars(root.value).items():
            if name not in names.get(root.name, ()) and root.follows(name):
                yield from _keys_under(value, first, known)


def _changed(
    capture: Capture,
    first: Capture | None,
    all_changed: bool,
    known: frozenset[int],
    touched: Set[int] | None = None,
) -> Iterator[tuple[str, frozenset[str]]]:
    """Yield the names of the attributes that have changed since ``first`` or are gone, root by root.

    Args:
        capture: What is held now.
        first: What was held then.
        all_changed: Whether everything counts as changed.
        known: The ``id`` of each object that has a name of its own.
        touched: The keys of all records that are new since ``first``, and perhaps of others; None for all.
    """
    if first is None:
        return
    moved = _Moved(capture, first, touched)
    if not moved.any() and not all_changed:
        return
    is_below = moved.any(but=known)
    for root in capture.roots:
        record, before_it = capture.attributes_of(root), first.records.get(id(root.value))
        was = dict(zip(before_it.names, before_it.values, strict=True)) if isinstance(before_it, Attributes) else {}
        names = frozenset(name for name in was.keys() - {*record.names} if root.follows(name)) | {
            name
            for name, value in zip(record.names, record.values, strict=True)
            if (all_changed and not root.of_process)
            or name not in was
            or _is_exchanged(value, was[name])
            or (is_below and _leads_to_moved(value, moved, capture, known))
        }
        if names:
            yield root.name, names


class _Moved:
    """The keys of what holds something else than before. They are not collected in a set: there may be many."""

    def __init__(self, capture: Capture, first: Capture, touched: Set[int] | None) -> None:
        self._now, self._before = capture.records, first.records
        self._touched = capture.records.keys() if touched is None else touched
        before = first.copies_by_id()
        self._written = {
            id(held.value)
            for held, now in capture.copies
            if id(held.value) not in before or (held.changes > 0 and before[id(held.value)] is not now)
        }

    def __contains__(self, key: int) -> bool:
        return key in self._written or (key in self._touched and self._is_other(key))

    def any(self, but: frozenset[int] = frozenset()) -> bool:
        """Return whether anything has moved ``but`` objects with these ``id``, to which no attribute leads."""
        keys = chain(self._written, filter(self._is_other, self._touched))
        return any(key not in but and ~key not in but for key in keys)

    def _is_other(self, key: int) -> bool:
        return key in self._now and self._before.get(key) is not self._now[key]


def _is_exchanged(now: Any, then: Any) -> bool:
    return now is not then and not (type(now) in ATOMS and is_same_atom(now, then))


def _leads_to_moved(value: Any, moved: _Moved, capture: Capture, known: frozenset[int]) -> bool:
    if type(value) in ATOMS:  # most attributes are, and lead to nothing
        return False
    return any(key in moved for key in _keys_under(value, capture, known))


def _children_of(record: Record) -> Iterator[Any]:
    return (child for _, child in record.children())


def _keys_under(
    value: Any,
    capture: Capture,
    known: frozenset[int],
    children: Callable[[Record], Iterable[Any]] = _children_of,
) -> Iterator[int]:
    """Yield the keys of all objects that a value leads to, but not through what is ``known`` by itself."""
    ahead, seen = [value], set[int]()
    while ahead:
        reached = ahead.pop()
        if id(reached) in known or id(reached) in seen or kind_of(reached) in (Kind.ATOM, Kind.CLOSED):
            continue
        seen.add(id(reached))
        yield id(reached)
        yield ~id(reached)
        for key in (id(reached), ~id(reached)):
            if key in capture.records:
                ahead += children(capture.records[key])


def _columns_of(record: Items | Entries) -> list[list[Any]]:
    return [record.items] if isinstance(record, Items) else [record.items, record.keys]


class _Sizes:
    """Estimates how much the attributes of a capture take.

    Args:
        capture: The capture.
        limits: What is too large.
        known: The ``id`` of each object that has a name of its own.
        segments: The segments of long lists and dicts.
    """

    def __init__(self, capture: Capture, limits: Limits, known: frozenset[int], segments: Segments) -> None:
        self._capture, self.limits, self._known, self._segments = capture, limits, known, segments
        self._bytes = {id(held.value): held.nbytes for held, _ in capture.copies}

    def is_large(self, record: Attributes, name: str) -> bool:
        """Return whether an attribute takes too much."""
        if name not in record.names:  # it is gone
            return False
        value = record.values[record.names.index(name)]
        if self._length(self._capture.records.get(id(value))) > self.limits.many:
            return True
        keys = list(islice(_keys_under(value, self._capture, self._known, self._children), 2 * self.limits.many + 1))
        if len(keys) > 2 * self.limits.many:
            return True
        records = [self._capture.records[key] for key in keys if key in self._capture.records]
        lengths = [*map(self._length, records)]
        segments = [part for record in records for part in self._parts(record) if isinstance(part, Segment)]
        if sum(len(segment.sent) for segment in segments) > self.limits.segments_bytes:
            return True
        size = sum(self._bytes.get(key, 0) for key in keys) + 8 * sum(lengths)
        size += sum(each.nbytes for key in keys if isinstance(each := self._content(key), Tensor))
        return size > self.limits.large_bytes or max(lengths, default=0) > self.limits.many

    def _parts(self, record: Record | None) -> Sequence[Part]:
        return self._segments.parts_of(record) or ()

    def _children(self, record: Record) -> Iterable[Any]:
        """Yield what a record leads to, but for what is in segments."""
        parts = self._parts(record)
        if not isinstance(record, (Items, Entries)) or not parts:
            return _children_of(record)
        return (each[place] for each in _columns_of(record) for part in parts if type(part) is range for place in part)

    def _length(self, record: Record | None) -> int:
        if record is None or isinstance(record, (Attributes, Slots)):
            return 0
        parts = self._parts(record)
        if parts:
            return sum(len(part) if isinstance(part, range) else 1 for part in parts)
        return len(getattr(record, "members", getattr(record, "items", ())))

    def _content(self, key: int) -> Any:
        return getattr(self._capture.records.get(key), "content", None)
