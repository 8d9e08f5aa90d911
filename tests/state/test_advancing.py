"""Objects that advance by being used: iterators, streams, queues, functions that keep something. Put back, and sent."""

import collections
import datetime
import decimal
import fractions
import functools
import io
import itertools
import queue
import re
import sys
import threading
import time
import types
import uuid
import zoneinfo
from collections import deque
from collections.abc import Callable
from pathlib import Path, PurePosixPath
from typing import Any

import numpy as np
import pytest
import torch
import torchmetrics
from lightning.pytorch import LightningModule

from lightning_replica._compat.tree import Tree
from lightning_replica.state import metrics
from lightning_replica.state.objects import records
from tests.state.test_reachable import Copies, put_sent

ITERATORS: dict[str, Callable[[], Any]] = {
    "list": lambda: iter(list(range(40))),
    "reversed list": lambda: reversed(list(range(40))),
    "tuple": lambda: iter(tuple(range(40))),
    "text": lambda: iter("abcdefghij" * 4),
    "range": lambda: iter(range(40)),
    "keys": lambda: iter({n: n for n in range(40)}),
    "values": lambda: iter({n: n for n in range(40)}.values()),
    "items": lambda: iter({n: n for n in range(40)}.items()),
    "set": lambda: iter(set(range(40))),
    "deque": lambda: iter(deque(range(40))),
    "reversed deque": lambda: reversed(deque(range(40))),
    "bytearray": lambda: iter(bytearray(range(40))),
    "callable": lambda: iter(Counter(), 99),
    "enumerate": lambda: enumerate("abcdefghij" * 4),
    "zip": lambda: zip(range(40), "abcdefghij" * 4, strict=False),
    "map": lambda: map(abs, range(40)),
    "filter": lambda: filter(None, range(40)),
    "map of zip": lambda: map(max, zip(range(40), range(40, 0, -1), strict=True)),
}
# Python 3.14 says nothing of how far these have come, but of two.
FROM_ITERTOOLS: dict[str, Callable[[], Any]] = {
    "count": lambda: itertools.count(3, 2),
    "repeat": lambda: itertools.repeat(3, 40),
    "cycle": lambda: itertools.cycle([1, 2, 3]),
    "chain": lambda: itertools.chain([1, 2], range(3, 40)),
    "islice": lambda: itertools.islice(range(100), 2, None, 2),
    "accumulate": lambda: itertools.accumulate(range(40)),
    "product": lambda: itertools.product([1, 2], [3, 4, 5], [1, 2, 3]),
    "permutations": lambda: itertools.permutations(range(4)),
    "dropwhile": lambda: itertools.dropwhile(bool, range(40)),
    "starmap": lambda: itertools.starmap(pow, [(n, 2) for n in range(40)]),
    "compress": lambda: itertools.compress(range(60), itertools.cycle([1, 0])),
}
KNOWN = {**ITERATORS, **(FROM_ITERTOOLS if sys.version_info < (3, 14) else {})}


class Counter:
    def __init__(self) -> None:
        self.n = 0

    def __call__(self) -> int:
        self.n += 1
        return self.n


def module_with(value: Any) -> Any:
    module: Any = LightningModule()
    module.it = value
    return module


@pytest.mark.parametrize("steps", [0, 1, 2, 3, 7])
@pytest.mark.parametrize("name", KNOWN)
def test_iterators(name: str, steps: int) -> None:
    module = module_with(KNOWN[name]())
    copies = Copies(module)
    for _ in range(steps):
        next(module.it)
    taken = copies.take()
    sent = copies.private(taken)
    expected = [next(module.it) for _ in range(4)]
    copies.take()
    next(module.it)
    for _ in range(2):
        copies.put(taken)
        assert [next(module.it) for _ in range(4)] == expected
    fresh = module_with(KNOWN[name]())
    found = put_sent(fresh, sent)
    assert [next(fresh.it) for _ in range(4)] == expected
    assert copies.inexact.known == found.inexact.known == {}


def test_an_iterator_of_which_nothing_is_known() -> None:
    copies = Copies(module_with(itertools.pairwise(range(9))))
    ((name, finding),) = copies.inexact.known.items()
    assert name == "module.it"
    assert finding.why == "it is a itertools.pairwise, which changes and cannot be restored"


class Holder:
    """State of many kinds that advances."""

    def __init__(self) -> None:
        self.bytes, self.text = io.BytesIO(b"begin"), io.StringIO()
        self.queue: Any = queue.Queue()
        self.last: Any = queue.LifoQueue()
        self.event, self.lock, self.room = threading.Event(), threading.Lock(), threading.Semaphore(3)
        self.items: list[int] = []
        self.add: Any = self.items.append  # a bound method of a list
        self.partial = functools.partial(next, iter(range(100)))
        self.default = lambda *, count=itertools.count(): next(count)  # noqa: B008
        self.nested = [iter([iter("abc"), iter("de")])]

    def advance(self, n: int) -> None:
        self.bytes.seek(2)
        self.bytes.write(bytes([n, n]))
        self.text.write(str(n))
        self.queue.put(n)
        self.last.put(n)
        self.add(n)
        self.partial()
        self.room.acquire(blocking=False)
        if n % 2:
            self.event.set()
        else:
            self.event.clear()

    def seen(self) -> list[Any]:
        return [
            (self.bytes.getvalue(), self.bytes.tell(), self.text.getvalue(), self.text.tell()),
            (list(self.queue.queue), list(self.last.queue), self.queue.unfinished_tasks),
            (self.event.is_set(), self.room._value, self.items, self.add.__self__ is self.items),
        ]


def test_streams_queues_and_what_has_a_lock() -> None:
    module = module_with(Holder())
    copies = Copies(module)
    module.it.advance(1)
    taken, was = copies.take(), module.it.seen()
    sent = copies.private(taken)
    following = module.it.partial()
    for n in (2, 4):
        module.it.advance(n)
        copies.take()
    copies.put(taken)
    assert module.it.seen() == was
    assert module.it.partial() == following
    fresh = module_with(Holder())
    found = put_sent(fresh, sent)
    assert fresh.it.seen() == was
    assert fresh.it.partial() == following
    assert copies.inexact.known == found.inexact.known == {}


def test_a_stream_is_emptied_and_stays_the_same_object() -> None:
    module = module_with(io.StringIO())
    copies = Copies(module)
    stream, taken = module.it, copies.take()
    stream.write("later")
    copies.take()
    copies.put(taken)
    assert module.it is stream
    assert (stream.getvalue(), stream.tell()) == ("", 0)


@pytest.mark.skipif(sys.version_info >= (3, 14), reason="there, nothing is known of a count in itertools")
def test_an_iterator_in_a_default_value() -> None:
    module = module_with(Holder())
    copies = Copies(module)
    module.it.default()
    taken = copies.take()
    assert module.it.default() == 1
    copies.take()
    copies.put(taken)
    assert module.it.default() == 1


class Opaque:
    """As an object of a C library: it has no attributes, but it can be pickled."""

    __slots__ = ()
    values: dict[int, list[int]] = {}

    def __reduce__(self) -> Any:
        return Opaque, (), (bytes(5000), *self.values.setdefault(id(self), []))  # too much to be asked in each step


def test_an_opaque_object_that_changes_is_named_when_it_is_put_back() -> None:
    module = module_with(Opaque())
    copies = Copies(module)
    taken = copies.take()
    copies.put(taken)
    assert copies.inexact.known == {}
    Opaque.values[id(module.it)].append(1)
    copies.put(taken)
    ((name, finding),) = copies.inexact.known.items()
    assert (name, finding.scope) == ("module.it", "fault")
    assert finding.why == "it is a tests.state.test_advancing.Opaque, which has changed and cannot be restored"


def test_an_opaque_object_of_which_nothing_is_known() -> None:
    module = module_with(queue.SimpleQueue())
    module.lock, module.ref = threading.Lock(), __import__("weakref").ref(module)
    module.thing = object.__new__(type("Thing", (), {"__slots__": (), "__reduce__": lambda self: 1 / 0}))
    copies = Copies(module)
    copies.put(copies.take())
    assert {name: finding.scope for name, finding in copies.inexact.known.items()} == {"module.thing": "unknown"}
    assert copies.inexact.after(replaced=True) == {}


class Arrays:
    """Arrays that are no plain numbers, and a sparse tensor."""

    def __init__(self) -> None:
        self.objects = np.array([1, [2], {}], dtype=object)
        self.records = np.zeros(2, dtype=[("a", "i4"), ("b", "f4", (2,))])
        self.times = np.array(["2020-01-01", "2021-02-03"], dtype="datetime64[D]")
        self.texts = np.array(["a", "bcd"])
        self.bits = np.array([True, False])
        self.masked = np.ma.masked_array([1.0, 2.0, 3.0], mask=[False, True, False])
        self.sparse = torch.zeros(4, 3).to_sparse()
        self.deep = [np.array([[1, 2], [3, 4]], dtype=object).T]

    def advance(self, n: int) -> None:
        self.objects[0] += n
        self.objects[1].append(n)
        self.objects[2][n] = "x"
        self.records["a"] += n
        self.records["b"][1] += n
        self.times += np.timedelta64(n, "D")
        self.texts[0] = f"b{n}"
        self.bits[n % 2] ^= True
        self.masked[n % 3] += n
        self.masked[n % 2] = np.ma.masked
        self.sparse = (self.sparse.to_dense() + n).to_sparse()
        self.deep[0][0, 1] = [n]

    def seen(self) -> list[Any]:
        return [
            (repr(self.objects), repr(self.records), self.times.tolist(), self.texts.tolist(), self.bits.tolist()),
            (self.masked.data.tolist(), self.masked.mask.tolist(), self.sparse.to_dense().tolist(), repr(self.deep)),
        ]


@pytest.mark.parametrize("steps", [0, 1, 2])
def test_arrays(steps: int) -> None:
    module = module_with(Arrays())
    arrays = [value for value in vars(module.it).values() if isinstance(value, np.ndarray)]
    copies = Copies(module)
    for n in range(steps):
        module.it.advance(n + 1)
    taken, was = copies.take(), module.it.seen()
    sent = copies.private(taken)
    for n in (5, 6):
        module.it.advance(n)
        copies.take()
    copies.put(taken)
    assert module.it.seen() == was
    assert all(a is b for a, b in zip(arrays, vars(module.it).values(), strict=False))
    fresh = module_with(Arrays())
    found = put_sent(fresh, sent)
    assert fresh.it.seen() == was
    assert isinstance(fresh.it.masked, np.ma.MaskedArray)
    assert copies.inexact.known == found.inexact.known == {}


def test_an_array_whose_class_the_replacement_does_not_have_there() -> None:
    module, fresh = module_with(None), module_with(None)
    copies = Copies(module)
    module.it = np.ma.masked_array([1.0, 2.0], mask=[False, True])
    found = put_sent(fresh, copies.private(copies.take()))
    assert list(found.inexact.known) == ["module.it"]


def test_a_queue_of_which_only_the_length_is_known() -> None:
    module = module_with(queue.SimpleQueue())
    copies = Copies(module)
    taken = copies.take()
    module.it.put(1)
    copies.put(taken)
    ((name, finding),) = copies.inexact.known.items()
    assert (name, finding.scope) == ("module.it", "fault")


def test_a_thread_that_waits_at_a_queue_goes_on() -> None:
    """It waits because the queue is full, and the queue goes back to when it was empty."""
    module = module_with(queue.Queue(maxsize=1))
    copies = Copies(module)
    taken = copies.take()
    module.it.put(1)
    puts = threading.Thread(target=module.it.put, args=(2,), daemon=True)
    puts.start()
    while not module.it.not_full._waiters:
        time.sleep(0.001)
    copies.put(taken)
    puts.join(60)
    assert not puts.is_alive()
    assert list(module.it.queue) == [2]


def test_records_with_objects_in_them_are_named() -> None:
    module, fresh = (module_with(np.zeros(2, dtype=[("a", "i4"), ("b", "O")])) for _ in range(2))
    copies = Copies(module)
    taken = copies.take()
    module.it["b"][0] = [1]
    copies.put(taken)
    assert copies.inexact.known["module.it"].scope == "fault"
    assert put_sent(fresh, copies.whole()).inexact.known == {}


def test_what_is_pickled_is_pickled_once(monkeypatch: pytest.MonkeyPatch) -> None:
    pickled: list[Any] = []

    def digest(value: Any) -> bytes:
        pickled.append(value)
        return b""

    monkeypatch.setattr(records, "pickled_digest", digest)
    module = module_with(Opaque())
    copies = Copies(module)
    for _ in range(200):
        module.hidden = torch.zeros(1000)  # so much is replaced that the objects are walked over again
        copies.take()
    assert pickled == [module.it]


def scaled(values: Any, by: float = 1.0) -> Any:
    return values * by


def made_in_training(module: Any) -> None:
    """Functions in objects that were not there when training began, some of which stand elsewhere, too."""
    inner = types.SimpleNamespace(activation=scaled, scale=functools.partial(scaled, by=3.0))
    inner.method, inner.builtin = module.other.__call__, torch.nn.functional.gelu
    inner.pop = module.several.pop
    module.it = inner


def test_functions_of_objects_that_are_made_in_training() -> None:
    """Functions are found by their names; partials and methods are made of them."""

    def new() -> Any:
        module = module_with(None)
        module.function, module.normal = scaled, functools.partial(torch.nn.init.normal_, std=0.02)
        module.one, module.other, module.several = Counter(), Counter(), [1, 2, 3]
        return module

    module, fresh = new(), new()
    copies = Copies(module)
    made_in_training(module)
    module.it.normal = functools.partial(torch.nn.init.normal_, std=0.5)
    sent = copies.whole(copies.take())
    assert put_sent(fresh, sent).inexact.known == {}
    assert (fresh.it.activation, fresh.it.builtin) == (scaled, torch.nn.functional.gelu)
    assert (fresh.it.scale.func, fresh.it.scale(2.0)) == (scaled, 6.0)
    assert (fresh.it.normal.keywords, fresh.normal.keywords) == ({"std": 0.5}, {"std": 0.02})
    assert fresh.it.method.__self__ is fresh.other
    assert fresh.it.pop() == 3
    assert fresh.several == [1, 2]


REFERRED: dict[str, tuple[Any, Callable[[Any], Any]]] = {
    "object": (Counter, lambda value: value),
    "list": (lambda: [1], lambda value: value),
    "dict": (lambda: {"a": 1}, lambda value: value),
    "set": (lambda: {1}, lambda value: value),
    "tensor": (lambda: torch.zeros(2), lambda value: value),
    "array": (lambda: np.zeros(2), lambda value: value),
    "method": (Counter, lambda value: value.__call__),
    "builtin method": (lambda: [1], lambda value: value.append),
    "partial": (Counter, lambda value: functools.partial(value.__call__)),
    "in a list": (Counter, lambda value: [value]),
    "in an object": (Counter, lambda value: types.SimpleNamespace(inner=value)),
}


@pytest.mark.parametrize("name", REFERRED)
def test_what_refers_to_another_object_than_before(name: str) -> None:
    """Neither object changes; what is sent must not be written into the one that was referred to."""
    make, refer = REFERRED[name]

    def new() -> Any:
        module = module_with(None)
        module.first, module.second = make(), make()
        module.reference = refer(module.first)
        return module

    module, fresh = new(), new()
    copies = Copies(module)
    was = fresh.first
    module.reference = refer(module.second)
    mark(module.second)
    assert put_sent(fresh, copies.whole(copies.take())).inexact.known == {}
    mark(module.second, 2)
    mark_through(fresh.reference, 2)
    assert fresh.first is was
    assert repr(seen_of(fresh.first)) == repr(seen_of(make()))
    assert repr(seen_of(fresh.second)) == repr(seen_of(module.second))


def seen_of(value: Any) -> Any:
    return value.n if isinstance(value, Counter) else value


def mark(value: Any, by: int = 1) -> None:
    """Change something, in place."""
    if isinstance(value, Counter):
        value.n += by
    elif isinstance(value, list):
        value.append(by)
    elif isinstance(value, dict):
        value["b"] = by
    elif isinstance(value, set):
        value.add(by)
    else:
        value += by


def mark_through(reference: Any, by: int) -> None:
    """Change what ``reference`` refers to."""
    if callable(reference) and not isinstance(reference, Counter):
        mark(getattr(reference, "func", reference).__self__, by)
    elif isinstance(reference, types.SimpleNamespace):
        mark(reference.inner, by)
    elif isinstance(reference, list) and isinstance(reference[0], Counter):
        mark(reference[0], by)
    else:
        mark(reference, by)


class Labelled(torch.Tensor):
    """A tensor that cannot be copied by its own methods where its labels are missing, as `pina`'s LabelTensor."""

    labels: Any

    def clone(self, *args: Any, **kwargs: Any) -> Any:
        raise AttributeError("no labels")

    def detach(self) -> Any:
        raise AttributeError("no labels")

    def __deepcopy__(self, memo: Any) -> Any:
        raise AttributeError("no labels")


@pytest.mark.parametrize("grad", [False, True])
def test_tensors_whose_own_methods_fail(grad: bool) -> None:
    weight = torch.ones(2, requires_grad=grad)
    labelled: Any = (weight * 2).as_subclass(Labelled)
    labelled.labels = ["x", "y"]
    module = module_with(labelled)
    copies = Copies(module)
    taken = copies.take()
    sent = copies.whole(taken)
    with torch.no_grad(), torch._C.DisableTorchFunctionSubclass():
        torch.Tensor.add_(labelled, 1)
    labelled.labels.append("z")
    module.other = 1
    copies.put(taken)
    assert type(module.it) is Labelled
    assert (module.it.tolist(), module.it.labels) == ([2.0, 2.0], ["x", "y"])
    assert not module.it.requires_grad
    fresh = module_with(None)
    put_sent(fresh, sent)
    assert copies.inexact.known == {}


def test_a_metric_state_keeps_its_class() -> None:
    metric = torchmetrics.MeanMetric()
    labelled: Any = torch.ones(()).as_subclass(Labelled)
    labelled.labels = ["x"]
    metric.mean_value = labelled
    taken = metrics.MetricStates().copy(Tree.of(metric))
    metric.mean_value = torch.zeros(())
    metrics.put_states([metric], taken)
    assert type(metric.mean_value) is Labelled
    assert (metric.mean_value.item(), metric.mean_value.labels) == (1.0, ["x"])


CONSTANTS: dict[str, Any] = {
    "class": Counter,
    "class of torch": torch.nn.GELU,
    "datetime": datetime.datetime(2026, 1, 2, 3, 4, 5, 6),
    "datetime with an offset": datetime.datetime(2026, 1, 2, tzinfo=datetime.timezone.utc),
    "date": datetime.date(2026, 1, 2),
    "time": datetime.time(1, 2, 3, 4),
    "duration": datetime.timedelta(1, 2, 3),
    "decimal": decimal.Decimal("1.10"),
    "fraction": fractions.Fraction(1, 3),
    "uuid": uuid.UUID(int=7),
    "pattern": re.compile("a+", re.IGNORECASE),
    "bytes pattern": re.compile(b"a+"),
    "slice": slice(1, None, 2),
    "complex": 1 + 2j,
    "size": torch.Size([2, 3]),
    "datetime of numpy": np.datetime64("2026-01-02"),
    "text of numpy": np.str_("abc"),
    "bool of numpy": np.bool_(True),
    "path": PurePosixPath("a/b"),
}


@pytest.mark.parametrize("name", CONSTANTS)
def test_what_cannot_change_is_sent(name: str) -> None:
    module, fresh = module_with(None), module_with(None)
    copies = Copies(module)
    module.it = CONSTANTS[name]
    assert put_sent(fresh, copies.whole(copies.take())).inexact.known == {}
    assert type(fresh.it) is type(module.it)
    assert repr(fresh.it) == repr(module.it)
    assert fresh.it == module.it


@pytest.mark.parametrize("zone", ["Europe/Berlin"])
def test_a_time_of_a_zone_is_named(zone: str) -> None:
    module, fresh = module_with(None), module_with(None)
    copies = Copies(module)
    module.it = datetime.datetime(2026, 1, 2, tzinfo=zoneinfo.ZoneInfo(zone))
    assert [*put_sent(fresh, copies.whole(copies.take())).inexact.known] == ["module.it"]


class Mixed:
    """What projects add to a tuple with names."""

    def total(self) -> int:
        return sum(self)  # type: ignore[call-overload]


def test_classes_that_a_script_has_made() -> None:
    """As `pytorch-forecasting` does in the first forward pass: a subclass of a tuple with the names of the outputs."""
    module, fresh = module_with(None), module_with(None)
    copies = Copies(module)
    output: Any = collections.namedtuple("output", ["prediction", "x"])

    class Output(Mixed, output):
        pass

    module.it, module.plain, module.made = Output, output, Output(1, 2)
    assert put_sent(fresh, copies.whole(copies.take())).inexact.known == {}
    found = fresh.it(prediction=1, x=2)
    assert (found.total(), found.prediction, repr(found)) == (3, 1, repr(module.made))
    assert fresh.it.__mro__[1:] == (Mixed, fresh.it.__mro__[2], tuple, object)
    assert fresh.plain._fields == ("prediction", "x")


def test_classes_whose_making_would_run_code_are_named() -> None:
    module, fresh = module_with(None), module_with(None)
    copies = Copies(module)
    module.body = type("Body", (), {"n": 1})
    module.it = type.__new__(type, "Made", (Quiet,), {"__module__": "made"})
    assert {*put_sent(fresh, copies.whole(copies.take())).inexact.known} == {"module.it", "module.body"}


class Quiet:
    made = 0

    def __init_subclass__(cls) -> None:
        Quiet.made += 1
        assert Quiet.made == 1, "code of the user's class has run again"


class Table:
    """Writes rows to a file, of which there is another one for every ten rows, and counts them."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.rows, self.lengths = folder, 0, io.StringIO()
        self.file: Any = None

    def write(self) -> int:
        if self.rows % 10 == 0:
            if self.file is not None:
                self.file.close()
            self.file = (self.folder / f"{self.rows}.csv").open("w")
        self.file.write("row\n")
        self.rows += 1
        self.lengths.write("4,")
        return self.rows + len(self.lengths.getvalue())


def test_an_object_that_holds_a_file(tmp_path: Path) -> None:
    """What it counts goes back. The file that it has open stays open."""
    module, other = module_with(Table(tmp_path)), module_with(Table(tmp_path))
    copies = Copies(module)
    for _ in range(9):
        module.it.write()
    taken = copies.take()
    expected = [module.it.write() for _ in range(3)]
    copies.put(taken)
    assert not module.it.file.closed
    assert [module.it.write() for _ in range(3)] == expected
    assert {finding.scope for finding in copies.inexact.known.values()} == {"fault"}
    assert list(copies.inexact.known) == ["module.it.file"]
    put_sent(other, copies.private())
    assert (other.it.rows, other.it.lengths.getvalue()) == (module.it.rows, module.it.lengths.getvalue())
    module.it.file.close()


class Counted:
    @staticmethod
    def call() -> int:
        here: Any = Counted.call
        here.calls = getattr(here, "calls", 0) + 1
        return int(here.calls)


def test_attributes_of_a_static_method() -> None:
    module, other = module_with(Counted()), module_with(Counted())
    copies = Copies(module)
    Counted.call()
    taken = copies.take()
    sent = copies.private(taken)
    expected = [Counted.call() for _ in range(3)]
    copies.put(taken)
    assert [Counted.call() for _ in range(3)] == expected
    replaced = put_sent(other, sent)
    assert [Counted.call() for _ in range(3)] == expected
    assert not {**copies.inexact.known, **replaced.inexact.known}
