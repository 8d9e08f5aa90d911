"""One walk over everything that is reachable, taken at one point and put back there.

The walk begins at roots: the modules of a model, callbacks, the data module. It follows attributes, slots, containers,
closures and iterators, whatever their classes are. It stops at anchors: objects that have a name in every process of a
job and whose content other code restores, as parameters, buffers and optimizers.

[Note: most of it stays]
A snapshot is taken twice a step, and most of what is reachable are settings. So the records of the snapshot before are
compared with the objects, and only what has changed is recorded again. That takes 0.3 us for a module. What large
containers hold is compared as a whole in the first windows only, and then in turn: see `contents`.

A container that is refilled while training (a list of losses, a cache of samples) is compared itself in each window,
and only its new items are recorded. Its items are compared in turn, too: most are never written to again.
"""

import functools
import gc
import operator
import sys
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Set
from contextlib import AbstractContextManager, contextmanager, suppress
from dataclasses import dataclass, field
from itertools import chain, islice, repeat
from types import FunctionType, GeneratorType, MethodType
from typing import Any, Final

from torch import Tensor, nn

from lightning_replica._compat.torch import data_version
from lightning_replica.core.inexact import Report, Scope
from lightning_replica.state.objects.contents import (
    COPIED_BYTES,
    FIRST_WINDOWS,
    Contents,
    Copy,
    Held,
    is_content,
    is_marked,
    late,
    learns,
    marked_copy_of,
    plain_of,
    same_content,
)
from lightning_replica.state.objects.kinds import (
    OF_CLASSES,
    Kind,
    derives_attributes,
    describe,
    has_attributes,
    is_exchanged_only,
    is_harmless,
    is_of_pandas,
    kind_of,
    slots_of,
)
from lightning_replica.state.objects.rebuilding import parts_of
from lightning_replica.state.objects.records import (
    OF_KIND,
    Attributes,
    Block,
    Closure,
    Graphed,
    MethodInC,
    Rebuilt,
    Record,
    Remade,
    Slots,
    Unknown,
    Variable,
    Wrapper,
    beside_content,
    is_graphed,
    leads_on,
    mapping_of,
    wake_waiting,
)
from lightning_replica.state.objects.shared_memory import address_of

MANY: Final = 1000  # items of a container; what larger ones hold is compared in turn
_FEW: Final = 256  # items of a container that is refilled; likewise
_COUNTED: Final = 10_000  # tensors in large containers; to ask them all for their counters takes 2 ms
# Of these, a class of the user's may add attributes.
_WITH_MORE: Final = (
    *(Kind.LIST, Kind.DICT, Kind.SET, Kind.TUPLE, Kind.ARRAY, Kind.BYTES, Kind.STREAM, Kind.GENERATOR),
    Kind.REBUILT,
)
_FUNCTIONS: Final = (FunctionType, MethodType, functools.partial)
_ALL: Final = 200_000  # objects that are watched
_PICKLED_EACH: Final = 256  # windows: to pickle an object takes long
_IN_TURN: Final = 256  # of the objects in large containers, in one window; a container counts for its size
_ITEMS_PER_OBJECT: Final = 16  # which take as long to compare as an object
# What may be watched without being reachable any more: objects, one of so many, and bytes.
_DROPPED, _KEPT_OF, _DROPPED_BYTES = 32, 64, 2**24


@dataclass(frozen=True)
class Anchors:
    """Objects that have a name in every process of the job, and whose content other code restores.

    Attributes:
        names: Their names, by ``id``.
        storages: By the address of the memory of those that are tensors, the name of the first that lies there.
    """

    names: Mapping[int, str]
    storages: Mapping[int, str] = field(default_factory=dict)

    @classmethod
    def of(cls, objects: Iterable[tuple[str, Any]]) -> "Anchors":
        """Return the anchors for objects with their names; of an object with two names, the first counts."""
        names: dict[int, str] = {}
        storages: dict[int, str] = {}
        for name, value in objects:
            names.setdefault(id(value), name)
            if isinstance(value, Tensor):
                storages.setdefault(address_of(value), name)
        storages.pop(0, None)
        return cls(names, storages)

    def has_memory_of(self, value: Any) -> bool:
        """Return whether a tensor or an array lies in the memory of an anchor, as a row of a parameter does."""
        return bool(self.storages) and address_of(value) in self.storages

    def name_of_memory(self, value: Any) -> str:
        """Return the name of an anchor in whose memory a tensor or an array lies."""
        return self.storages[address_of(value)]


@dataclass(frozen=True)
class Root:
    """Where the walk begins.

    Attributes:
        value: The object.
        name: Its name, the same in every process of the job.
        own: Names of attributes that other code restores.
        only: Names of the only attributes that count; None for all.
        most: How many objects it may lead to; None if that does not matter.
        leads: How many of the ``own`` names come first in the object's attributes, as those of ``nn.Module`` do.
        of_process: Whether each process begins with a content of its own, so that only what changes is sent.
    """

    value: Any
    name: str
    own: frozenset[str] = frozenset()
    leads: int = 0
    only: tuple[str, ...] | None = None
    most: int | None = None
    of_process: bool = False

    def follows(self, name: str) -> bool:
        """Return whether an attribute counts."""
        return name in self.only if self.only is not None else name not in self.own


class Content(Record):
    """What a tensor or an array in a large container held."""

    __slots__ = ("copy", "has_attributes", "writes")

    def __init__(self, value: Any, name: str) -> None:
        super().__init__(value, name)
        self.copy, self.writes, self.has_attributes = marked_copy_of(value), self._count(), self._has_attributes()

    def _has_attributes(self) -> tuple[bool, bool]:
        return learns(self.value), is_marked(self.value)

    def _count(self) -> int:
        countable = type(self.value) is Tensor and not self.value.is_inference()
        return data_version(self.value) if countable else -1

    def is_written(self) -> bool:
        """Return whether torch has counted a write; it does not count all of them."""
        return self.writes >= 0 and data_version(self.value) != self.writes

    def is_same(self) -> bool:
        return self.has_attributes == self._has_attributes() and same_content(plain_of(self.value), self.copy)

    def put_back(self, stands: Callable[[Any], Any]) -> None:
        Held(self.value, self.name).put_back(self.copy)
        if not self.has_attributes[1] and is_marked(self.value):
            vars(self.value).clear()
        self.writes = self._count()


@dataclass(frozen=True)
class Capture:
    """All that was reachable at one point.

    Attributes:
        roots: Where the walk began.
        records: What objects held, by a key of their identity.
        copies: What tensors and arrays held; None of those that are large and have not been seen to change.
    """

    roots: Sequence[Root] = ()
    records: Mapping[int, Record] = field(default_factory=dict)
    copies: Sequence[tuple[Held, Copy]] = ()

    def attributes_of(self, root: Root) -> Attributes:
        """Return what the attributes of a root held."""
        record = self.records[id(root.value)]
        if not isinstance(record, Attributes):
            raise TypeError(f"{root.name} is no root of this capture.")
        return record

    def functions(self) -> Iterator[Any]:
        """Yield the functions that objects hold."""
        return (child for _, child in self.children() if issubclass(type(child), _FUNCTIONS))

    def tensors(self) -> Iterator[tuple[str, Tensor]]:
        """Yield all tensors, with names."""
        yield from ((held.name, held.value) for held, _ in self.copies if isinstance(held.value, Tensor))

    def copies_by_id(self) -> dict[int, Copy]:
        """Return what tensors and arrays held, by their ``id``."""
        return {id(held.value): copy for held, copy in self.copies}

    def by_name(self) -> dict[str, Any]:
        """Return the objects by their names; not those that share a name, as the members of a set do."""
        found: dict[str, Any] = {}
        shared = set[str]()
        known: list[Record | Held] = [*self.records.values(), *(held for held, _ in self.copies)]
        for held in known:
            name = f"{held.name} (cell)" if isinstance(held, Variable) else held.name  # its content has the same name
            if found.setdefault(name, held.value) is not held.value:
                shared.add(name)
        return {name: value for name, value in found.items() if name not in shared}

    def children(self) -> Iterator[tuple[str, Any]]:
        """Yield what the objects refer to, with names."""
        for record in self.records.values():
            with suppress(Exception):  # keys of the user's run code of their own; `Recorder` has told of it
                yield from [(record.name + name, value) for name, value in record.children()]

    def put_back(self, report: Report) -> None:
        """Restore all of it, in place.

        Args:
            report: Called with what has changed and cannot be restored, and with that of which nothing shows it.
        """
        stands = _Standing(self.records, report)
        for held, copy in self.copies:  # first: a gradient has the shape of its tensor
            try:
                if copy is not None:
                    held.put_back(copy)
                elif held.look():
                    report(held.name, "it has changed in the step that is repeated, and cannot be restored", "once")
            except Exception as error:  # it is a part of another one, in a way that cannot be written to
                report(held.name, _not_put_back(error), "once")
            if ~id(held.value) not in self.records and is_marked(held.value):
                vars(held.value).clear()  # it had no attributes then
        for record in self.records.values():
            try:
                record.put_back(stands)
            except Exception as error:  # its class runs code of its own, or refuses
                report(record.name, _not_put_back(error), "once")
            if isinstance(record, Unknown) and (why := why_unrestored(record)) is not None:
                report(record.name, *why)
            elif isinstance(record, Attributes):
                wake_waiting(record.values)
        methods = (each for each in self.records.values() if isinstance(each, Closure))
        stands.report_former(each for each in methods if not isinstance(each, MethodInC))


@contextmanager
def _without_collections() -> Iterator[None]:
    """Collect no garbage in the block, which makes many objects and no garbage; that would take half of its time."""
    collects = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if collects:
            gc.enable()


class _Standing:
    """Returns what stands for a value after a restoration: the value, or what was made in its place.

    Args:
        records: What objects held, by their keys.
        report: Called with what could not be made again, and with what keeps the former object.
    """

    def __init__(self, records: Mapping[int, Record], report: Report) -> None:
        self._records, self._report = records, report
        self._remade = {key: each for key, each in records.items() if isinstance(each, Remade)}
        self._made: dict[int, Any] = {}
        self._making, self._cycles = set[int](), set[int]()

    def __call__(self, value: Any) -> Any:
        key = id(value)
        if key in self._making:
            self._cycles.add(key)
        elif key in self._remade and key not in self._made:
            self._making.add(key)
            self._made[key] = value  # a tuple that contains itself
            try:
                self._made[key] = self._remade[key].made_again(self)
                self._give(value, self._made[key])
            except Exception as error:  # its class runs code of its own, or refuses
                self._report(self._remade[key].name, _not_put_back(error), "once")
            self._making.discard(key)
        return self._made.get(key, value)

    def _give(self, former: Any, made: Any) -> None:
        """Give the attributes of an object to what was made in its place."""
        beside = self._records.get(~id(former))
        if made is not former and isinstance(beside, (Attributes, Slots)):
            beside.give(made, self)

    def report_former(self, functions: Iterable[Record]) -> None:
        """Report what still refers to an object in C that another one has taken the place of."""
        for record in functions:
            owner = getattr(record.value, "__self__", None)
            if self._is_former(owner):
                self._tell(record.name, owner)
        for key, record in self._remade.items():
            if isinstance(record, Rebuilt) and self._is_former(record.value):
                # Blocks of pandas know by weak references who shows their memory; `move_back` keeps them.
                is_watched = weakref.getweakrefcount(record.value) and not is_of_pandas(type(record.value))
                if key in self._cycles or is_watched:
                    self._tell(record.name, record.value)

    def _is_former(self, value: Any) -> bool:
        return self._made.get(id(value), value) is not value

    def _tell(self, name: str, value: Any) -> None:
        why = f"a {describe(value)} was made again, but methods, weak references or parts refer to the former one"
        self._report(name, why, "once")


def _not_put_back(error: Exception) -> str:
    return f"it could not be put back ({type(error).__name__}: {error})"


def why_unrestored(record: Unknown) -> tuple[str, Scope] | None:
    """Return why an object cannot be as it was when it was recorded; None if it is, or no result depends on it."""
    changed, what = record.has_changed(), describe(record.value)
    if changed:
        return f"it is a {what}, which has changed and cannot be restored", "fault"
    if changed is None and not is_harmless(type(record.value)):
        return f"it is a {what}, and nothing shows whether it changes", "unknown"
    return None


class Recorder:
    """Takes captures, each with what is the same of the one before.

    Args:
        report: Called with the name of something, and with why it is not restored after a fault.
        copied_bytes: See `contents.Contents`.

    Attributes:
        touched: The keys of all records that were made since its owner has last cleared it.
    """

    def __init__(self, report: Report, copied_bytes: int = COPIED_BYTES) -> None:
        self._report = report
        self._contents = Contents(report, copied_bytes)
        self._roots: Sequence[Root] = ()
        self._anchors = Anchors({})
        self._records: dict[int, Record] = {}
        self._former: Mapping[int, Record] = {}
        self._in_turn: dict[int, int] = {}  # by key of a record, the container that it is in
        self._counted: dict[int, Content] = {}  # those of them in which torch counts writes
        self._followed: dict[int, Any] = {}  # large containers whose content has been seen to change
        self._refilled: dict[int, Any] = {}  # those that have been seen to hold other objects than before
        self._containers: set[int] | None = None
        self._compared: dict[int, Record] | None = None
        self.touched = set[int]()
        self._modules = _Modules([])
        self._most = _ALL
        self._windows = self._turn = self._owed = self._dropped = self._dropped_bytes = 0
        self._last = Capture()
        self._stale = True

    def take(self, roots: Sequence[Root], anchors: Anchors, window: bool = True, whole: bool = False) -> Capture:
        """Return what is reachable now.

        Args:
            roots: Where the walk begins.
            anchors: Where it stops.
            window: Whether a window of batches begins. In the middle of a step, less is compared.
            whole: Whether everything is compared, whatever its size.
        """
        self._windows += window
        if self._stale or roots is not self._roots or anchors is not self._anchors:
            self._roots, self._anchors, self._stale = roots, anchors, False
            self._walk()
            changed = True
        else:
            changed = self._renew(window, whole)
        written = self._contents.refresh(window, whole)
        if any((held.learns or held.is_marked) and ~id(held.value) not in self._records for held in written):
            self._walk()  # from now on it has attributes, or may have a gradient
        if written or changed:
            copies = [(held, held.copy) for held in self._contents.held.values()]
            self._last = Capture(roots, dict(self._records), copies)
        return self._last

    def restart(self) -> None:
        """Count windows from the first one again."""
        self._windows = 0
        self._contents.restart()

    def forget(self) -> None:
        """Walk anew in the next `take`; called when a capture has been put back."""
        self._stale = True

    @_without_collections()
    def _walk(self) -> None:
        self._former, self._records, self._in_turn, self._counted = self._records, {}, {}, {}
        self._compared = None
        self._dropped = self._dropped_bytes = 0
        reached: set[int] = set()
        for root in self._roots:
            self._most = _ALL if root.most is None else min(_ALL, len(self._records) + root.most)
            self._add(id(root.value), Attributes(root.value, root.name, root.own, root.only), reached)
        self._most = _ALL
        self._modules = _Modules([root for root in self._roots if root.leads])
        self._contents.keep(reached)
        self.touched &= self._records.keys()
        self._followed = {key: each for key, each in self._followed.items() if key in self._records}
        self._refilled = {key: each for key, each in self._refilled.items() if key in self._records}
        self._former = {}

    def _add(
        self,
        key: int,
        first: Record,
        reached: set[int] | None,
        container: int | None = None,
        known: Set[int] = frozenset(),
        added: Sequence[tuple[str, Any]] | None = None,
    ) -> None:
        """Record an object and all that it leads to.

        Args:
            key: The key of the first record.
            first: What the object holds.
            reached: Gets the ``id`` of each tensor and array; None in the middle of a training.
            container: The key of the large container that the object is in.
            known: The ``id`` of each object that it has led to before.
            added: What it leads to besides what it has led to before; None if that is to be found out.
        """
        ahead = [(key, first, container)]
        while ahead:
            key, record, inside = ahead.pop()
            size = _size_of(record)
            if record is not first and len(self._records) + self._weight_of(record, size) >= self._most:
                self._report(
                    _whole(record.name), "too many objects are reachable: changes in some are not seen", "unknown"
                )
                continue
            record = self._known(key, record)
            record.key = key
            self._records[key] = record
            if self._former.get(key) is not record:
                self.touched.add(key)
            if inside is not None:
                self._in_turn[key] = inside
                if isinstance(record, Content) and record.writes >= 0 and len(self._counted) < _COUNTED:
                    self._counted[key] = record
            elif size > _FEW and self._followed.get(key) is not record.value:
                refilled = self._refilled.get(key) is record.value
                if refilled or size > MANY:
                    inside, self._containers = key, None
                if inside is not None and not refilled:
                    self._in_turn[key] = key
            self._compare_in_each_window(key, record)
            of_first = added if record is first else None
            leading = self._leading(record, known if record is first else frozenset()) if of_first is None else of_first
            found = [self._reached(record, name, value, reached, inside) for name, value in leading]
            ahead += [(*each, inside) for each in chain.from_iterable(found)][::-1]

    def _known(self, key: int, record: Record) -> Record:
        """Return the record of an earlier walk if the object is as it was then: it does not count as changed."""
        former = self._former.get(key)
        if former is None or former.value is not record.value or type(former) is not type(record):
            if isinstance(record, Unknown):
                record.look_closely()
            return record
        if isinstance(former, Attributes) and isinstance(record, Attributes) and not former.has_scope_of(record):
            return record
        if former.is_same():
            return former
        if isinstance(former, Unknown):
            self._report_unknown(former)
        return record

    def _compare_in_each_window(self, key: int, record: Record) -> None:
        if self._compared is not None:
            if key in self._in_turn or key in self._modules.keys:
                self._compared.pop(key, None)
            else:
                self._compared[key] = record

    def _weight_of(self, record: Record, size: int) -> int:
        """Return for how many objects a container counts: items that lead to nothing cost less."""
        return sum(map(leads_on, record.referred())) + size // _ITEMS_PER_OBJECT if size > MANY else size

    def _leading(self, record: Record, known: Set[int]) -> list[tuple[str, Any]]:
        try:
            return list(record.leading(known))
        except Exception as error:  # keys of the user's run code of their own
            self._report(record.name, f"it cannot be looked at ({type(error).__name__}: {error})")
            return []

    def _reached(
        self, parent: Record, name: str, value: Any, reached: set[int] | None, inside: int | None
    ) -> Iterable[tuple[int, Record]]:
        try:
            return list(self._reach(parent, name, value, reached, inside))
        except Exception as error:  # its class runs code of its own when it is asked for its attributes
            why = f"it cannot be looked at ({type(error).__name__}: {error}), so what it holds does not go back"
            self._report(parent.name + name, why)
            return ()

    def _reach(
        self, parent: Record, name: str, value: Any, reached: set[int] | None, inside: int | None
    ) -> Iterable[tuple[int, Record]]:
        """Yield the records of an object that is not known yet."""
        kind = kind_of(value)
        key = id(value)
        if kind in (Kind.ATOM, Kind.CLOSED) or key in self._anchors.names:
            return
        if key in self._records or ~key in self._records:
            return
        name = parent.name + name
        if type(value) is GeneratorType and isinstance(parent.value, AbstractContextManager):
            yield key, Block(value, name)
            return
        if kind is Kind.TENSOR:
            yield from self._reach_tensor(name, value, reached, inside)
        elif kind is Kind.ARRAY and is_content(value):
            if not self._anchors.has_memory_of(value):
                yield from self._reach_content(name, value, reached, inside)
            if (beside := beside_content(value, name)) is not None:  # of a class of its own, as a masked one
                yield ~key, beside
        elif kind is Kind.OBJECT:
            if has_attributes(value):
                yield id(value), Attributes(value, name)
            if slots_of(type(value)):
                yield ~id(value), Slots(value, name)
        else:
            mixed = kind is Kind.ARRAY and value.dtype != object  # records with objects in them
            if (kind is Kind.DICT and _is_of_a_module(value)) or (kind is Kind.VIEW and _is_of_a_class(value)):
                return
            if issubclass(type(value), (FunctionType, *OF_CLASSES)) and is_exchanged_only(value):
                return
            in_parts = self._in_parts(name, value) if kind is Kind.REBUILT else None
            record = in_parts or (Unknown if mixed else OF_KIND.get(kind, Unknown))(value, name)
            if isinstance(record, Unknown) and record.advances:
                self._report_unknown(record)
            leads_on = kind not in (Kind.TUPLE, Kind.FUNCTION) or any(
                kind_of(each) is not Kind.ATOM for _, each in record.children()
            )
            if not leads_on and (kind is Kind.FUNCTION or not has_attributes(value)):
                return
            if leads_on:
                yield key, record
            if isinstance(record, Rebuilt) and derives_attributes(type(value)):
                return
            if kind in _WITH_MORE and (beside := beside_content(value, name)) is not None:  # of the user's class
                yield ~key, beside

    def _in_parts(self, name: str, value: Any) -> Rebuilt | None:
        """Return what an object in C consists of; None if it does not say, or did not before."""
        former = self._former.get(id(value))
        if isinstance(former, Unknown) and former.value is value:
            return None
        parts = parts_of(value)
        return None if parts is None else Rebuilt(value, name, parts)

    def _reach_tensor(
        self, name: str, value: Tensor, reached: set[int] | None, inside: int | None
    ) -> Iterable[tuple[int, Record]]:
        has_gradient = value.requires_grad and value.is_leaf
        if vars(value) or has_gradient or type(value) not in (Tensor, nn.Parameter):
            yield ~id(value), beside_content(value, name) or Attributes(value, name)
        if not is_content(value):
            flattens = hasattr(value, "__tensor_flatten__")
            yield id(value), Wrapper(value, name) if flattens else Unknown(value, name)
        elif self._anchors.has_memory_of(value):
            return  # a part of a parameter, perhaps with a graph that leads to it
        elif is_graphed(value):
            yield id(value), Graphed(value, name)
        else:
            yield from self._reach_content(name, value, reached, inside)

    def _reach_content(
        self, name: str, value: Any, reached: set[int] | None, inside: int | None
    ) -> Iterable[tuple[int, Record]]:
        if inside is not None:
            yield id(value), Content(value, name)
            return
        self._contents.add(value, name)
        if reached is not None:
            reached.add(id(value))

    def _renew(self, window: bool, whole: bool) -> bool:
        """Record again what has changed. Return whether anything has."""
        if self._compared is None:
            rest = self._records.keys() - self._modules.keys - self._in_turn.keys()
            self._compared = {key: record for key, record in self._records.items() if key in rest}
        changed = [key for key in self._modules.changed() if not self._records[key].is_same()]
        changed += [key for key, record in self._compared.items() if not record.is_same()]
        changed += self._look_in_turn(window, whole)
        if window and self._windows % _PICKLED_EACH == 0:
            self._look_closely()
        if not changed:
            return False
        for key in changed:
            record = self._records[key]
            if isinstance(record, Unknown) and not _is_tensor_now(record.value):
                self._report_unknown(record)
            renewed, container = record.renewed(), self._in_turn.get(key)
            added = renewed.added_to(record)
            known = self._note_dropped(record, renewed) if added is None else frozenset[int]()
            if container == key or (container is None and _size_of(record) > _FEW):
                self._refilled[key] = record.value
                self._in_turn.pop(key, None)
                container = None
            self._add(key, renewed, None, container, known, added)
        dropped = max(_DROPPED, len(self._records) // _KEPT_OF)
        marked = any(isinstance(each := self._records[key], Content) and any(each.has_attributes) for key in changed)
        marked |= any(_is_of_another_kind(self._records[key]) for key in changed)
        if marked or self._dropped > dropped or self._dropped_bytes > _DROPPED_BYTES:
            self._walk()
        return True

    def _look_closely(self) -> None:
        """Compare one of the objects of which only the pickled form shows a change, and tell of it."""
        pickled = [each for each in self._records.values() if isinstance(each, Unknown) and each.pickled is not None]
        if pickled:
            record = pickled[self._windows // _PICKLED_EACH % len(pickled)]
            if record.has_changed():
                self._report_unknown(record)

    def _note_dropped(self, before: Record, now: Record) -> Set[int]:
        """Count what an object no longer refers to: it may not be reachable any more, and takes memory.

        Returns:
            The ``id`` of each object that it has referred to before.
        """
        known, kept = {id(value): value for value in before.referred()}, set(map(id, now.referred()))
        for key in known.keys() - kept:
            if kind_of(known[key]) not in (Kind.ATOM, Kind.CLOSED):
                self._dropped += 1
                held, record = self._contents.held.get(key), self._records.get(key)
                self._dropped_bytes += held.nbytes if held is not None else 0
                self._dropped_bytes += record.copy.nbytes if isinstance(record, Content) else 0
        return known.keys()

    def _look_in_turn(self, window: bool, whole: bool) -> list[int]:
        """Return the keys of what has changed in large containers, as far as it is compared now."""
        if not self._in_turn:
            return []
        whole = whole or self._windows <= FIRST_WINDOWS
        containers = {*self._in_turn.values()} if self._containers is None else self._containers
        self._containers = containers
        sized = [key for key in containers if key in self._in_turn and _has_other_size(self._records[key])]
        keys = [*self._in_turn] if whole else self._next_in_turn() if window else []
        found = [key for key in keys if not self._records[key].is_same()]
        written = dict.fromkeys(key for key, record in self._counted.items() if record.is_written())
        found_late = {self._in_turn[key] for key in found if key not in written and self._in_turn[key] not in sized}
        for container in () if whole else found_late:
            passed = 1 + sum(_cost_of(self._records[key]) for key in self._in_turn) // _IN_TURN
            self._report(self._records[container].name, late(passed), "once")
        found = [*dict.fromkeys([*sized, *written, *found])]
        changed = {self._in_turn[key] for key in found if self._in_turn[key] != key}  # something in it has changed
        if changed:  # from now on, all of it is compared
            self._followed |= {key: self._records[key].value for key in changed}
            self._in_turn = {key: inside for key, inside in self._in_turn.items() if inside not in changed}
            self._counted = {key: record for key, record in self._counted.items() if key in self._in_turn}
            self._containers = self._compared = None
            self._owed = 0
        return found

    def _next_in_turn(self) -> list[int]:
        """Return the keys of what is compared in this window; none after a container that takes several windows."""
        start, left, found = self._turn % len(self._in_turn), _IN_TURN - self._owed, list[int]()
        for key in chain(islice(self._in_turn, start, None), islice(self._in_turn, start)):
            if left <= 0:
                break
            left -= _cost_of(self._records[key])
            found.append(key)
        self._owed = max(0, -left)
        self._turn = start + len(found)
        return found

    def _report_unknown(self, record: Record) -> None:
        self._report(record.name, f"it is a {describe(record.value)}, which changes and cannot be restored")


class _Modules:
    """Compares the attributes of all modules at once: there are many, and they seldom change.

    Args:
        roots: The modules.
    """

    def __init__(self, roots: Sequence[Root]) -> None:
        self._objects = [root.value for root in roots]
        self._of = [vars(root.value) for root in roots]
        self._leads = [root.leads for root in roots]
        self._ids = [id(root.value) for root in roots]
        self.keys = frozenset(self._ids)
        self._note()

    def _note(self) -> None:
        self._names = list(chain.from_iterable(self._of))
        self._values = list(self._rest())
        self._classes = list(map(type, self._objects))

    def _rest(self) -> Iterable[Any]:
        return chain.from_iterable(map(islice, map(dict.values, self._of), self._leads, repeat(None)))

    def changed(self) -> list[int]:
        """Return the ``id`` of all modules if one of them has changed: which one, their records tell."""
        names = list(chain.from_iterable(self._of))
        is_same = names == self._names and all(map(operator.is_, self._rest(), self._values))
        if is_same and list(map(type, self._objects)) == self._classes:
            return []
        self._note()
        return self._ids


def _is_tensor_now(value: Any) -> bool:
    """Return whether a value is a tensor whose content can be compared, as a lazy one that has got its shape."""
    return issubclass(type(value), Tensor) and is_content(value)


def _is_of_another_kind(record: Record) -> bool:
    """Return whether the content of a tensor counts now, which did not: it has lost its graph, or got its shape."""
    if isinstance(record, Graphed):
        return not is_graphed(record.value)
    return isinstance(record, Unknown) and _is_tensor_now(record.value)


def _is_of_a_class(view: Any) -> bool:
    """Return whether a view shows the body of a class, as ``vars`` returns it. Classes are no objects of the walk."""
    mapping = mapping_of(view)
    return isinstance(mapping, dict) and "__module__" in mapping


def _is_of_a_module(value: dict[Any, Any]) -> bool:
    """Return whether a dict holds the variables of a module of Python: only those that code names count."""
    name = value.get("__name__") if type(value) is dict else None
    return isinstance(name, str) and getattr(sys.modules.get(name), "__dict__", None) is value


def leads_of(module: nn.Module, own: frozenset[str]) -> int:
    """Return how many attributes at the beginning are ``own``."""
    found = 0
    for name in vars(module):
        if name not in own:
            break
        found += 1
    return found


def _whole(name: str) -> str:
    """Return the name of what a name leads into: ``module.data`` of ``module.data[3].x``."""
    return name.partition("[")[0]


def _size_of(record: Record) -> int:
    items = getattr(record, "items", ())
    return len(items)


def _cost_of(record: Record) -> int:
    return 1 + _size_of(record) // _ITEMS_PER_OBJECT


def _has_other_size(record: Record) -> bool:
    return _size_of(record) > 0 and record.length_now() != _size_of(record)
