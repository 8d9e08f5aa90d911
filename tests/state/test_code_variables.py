"""Global variables of the user's modules, and attributes of classes and functions: which are found, and put back."""

import ctypes
import enum
import functools
import importlib.util
import logging
import multiprocessing
import os
import sys
import threading
import types
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from torch import nn
from torchmetrics import MeanMetric

from lightning_replica.core.inexact import Inexact
from lightning_replica.core.user_code import UserCode
from lightning_replica.state.code_variables import variables_of
from lightning_replica.state.objects import capture
from lightning_replica.state.objects.capture import Anchors, Recorder, Root
from tests.chaos import zoo
from tests.state.test_reachable import Copies, put_sent

ANCHORS = Anchors({})
COUNT = 0
LATER: Any  # there is none before the first step
SEEN: list[int] = []
DATASET = [{"id": number} for number in range(200)]
WEIGHT = torch.zeros(2)
UNUSED = 0
TALLY = SCORE = 0


def steps_of(function: Callable[..., int]) -> Callable[..., int]:
    steps = 0

    @functools.wraps(function)
    def counted(*arguments: Any) -> int:
        nonlocal steps
        steps += 1
        return function(*arguments) + steps

    return counted


def add(item: int, to: list[int] = []) -> int:  # noqa: B006
    to.append(item)
    return len(to)


@steps_of
def helps(number: int) -> int:
    global COUNT, LATER
    COUNT, LATER = COUNT + 1, number
    WEIGHT.data += 1
    return COUNT + int(WEIGHT.sum())


class Tallied:
    """A class that is used as a decorator."""

    def __init__(self, function: Callable[..., int]) -> None:
        self.function, self.calls = function, 0

    def __call__(self, *arguments: Any) -> int:
        self.calls += 1
        return self.function(*arguments) + self.calls


@Tallied
def weighs(number: int) -> int:
    global TALLY
    TALLY += number
    return TALLY


@functools.singledispatch
def scores(value: Any) -> int:
    return 0


@scores.register
def _(value: int) -> int:
    global SCORE
    SCORE += value
    return SCORE


class Named:
    made = 0
    names: list[str] = []

    @classmethod
    def make(cls) -> int:
        cls.made += 1
        cls.names.append("x")
        cls.last = cls.made  # type: ignore[attr-defined]
        return cls.made + len(cls.names)

    @staticmethod
    @functools.cache
    def made_once(name: str) -> list[int]:
        return []

    @classmethod
    @functools.lru_cache(maxsize=4)
    def made_for(cls, name: str) -> list[int]:
        return []

    @staticmethod
    def noted(number: int, to: list[int] = []) -> int:  # noqa: B006
        to.append(number)
        return len(to)

    @staticmethod
    def of_another() -> int:
        zoo.STEPS += 1
        return zoo.STEPS


class Derived(Named):
    @property
    def number(self) -> int:
        SEEN.append(1)
        return len(SEEN)

    def step(self) -> list[int]:
        self.made_once("a").append(1)
        self.made_for("a").append(1)
        decorated = [weighs(1), scores(1), len(self.made_once("a")), len(self.made_for("a")), self.noted(1)]
        return [self.number, self.make(), self.of_another(), add(1), helps(2), sum(add(n) for n in SEEN), *decorated]


def recorder() -> tuple[Recorder, Inexact]:
    inexact = Inexact()
    return Recorder(inexact.report), inexact


def test_all_of_it_goes_back_any_number_of_times() -> None:
    records, inexact = recorder()
    roots = [*variables_of(UserCode([], [Derived]))]
    taken = records.take(roots, ANCHORS)
    first = Derived().step()
    assert "LATER" in globals()
    for _ in range(3):
        taken.put_back(inexact.report)
        assert "LATER" not in globals()
        assert "last" not in vars(Derived)
        records.forget()
        assert Derived().step() == first
    taken.put_back(inexact.report)
    assert not inexact.known


def test_what_changes_is_seen() -> None:
    records, _ = recorder()
    roots = [*variables_of(UserCode([], [Derived]))]
    before = records.take(roots, ANCHORS)
    assert records.take(roots, ANCHORS) is before
    Derived().step()
    assert records.take(roots, ANCHORS) is not before
    before.put_back(lambda *_: None)


def test_only_what_code_of_the_users_names_counts() -> None:
    roots = {root.name: root for root in variables_of(UserCode([], [Derived, nn.Linear]))}
    mine = roots[f"globals of {__name__}"]
    assert mine.only is not None
    assert {"COUNT", "LATER", "SEEN", "WEIGHT"} <= set(mine.only)
    assert not {"UNUSED", "pytest", "torch", "Derived", "zoo"} & set(mine.only)
    assert "STEPS" in (roots["globals of tests.chaos.zoo"].only or ())
    assert not [name for name in roots if "torch" in name]
    assert f"class {__name__}.Named" in roots


def test_the_module_of_an_installed_class_counts_if_that_is_wanted() -> None:
    assert [*variables_of(UserCode([], [nn.LSTM]))] == []
    names = [root.name for root in variables_of(UserCode([MeanMetric()]))]
    assert "class torchmetrics.aggregation.MeanMetric" in names


@pytest.mark.parametrize("base", [int, float, str, bytes, complex])
def test_numbers_and_texts_with_attributes(base: Any) -> None:
    cls = type("Own", (base,), {})
    value = cls(b"1") if base is bytes else cls(1)
    value.note = [1]
    records, inexact = recorder()
    holder = type("Holder", (), {})()
    holder.value = value
    taken = records.take([Root(holder, "it")], ANCHORS)
    value.note.append(2)
    value.more = 1
    taken.put_back(inexact.report)
    assert (holder.value, holder.value.note, hasattr(value, "more")) == (value, [1], False)


def goes_back(change: Callable[[Any], None], shown: Callable[[Any], Any], **attributes: Any) -> Inexact:
    holder = type("Holder", (), {})()
    vars(holder).update(attributes)
    records, inexact = recorder()
    taken, before = records.take([Root(holder, "it")], ANCHORS), shown(holder)
    change(holder)
    assert shown(holder) != before
    taken.put_back(inexact.report)
    assert shown(holder) == before
    return inexact


class Pair(ctypes.Structure):
    _fields_ = (("count", ctypes.c_int), ("values", ctypes.c_double * 2))


class Pointing(ctypes.Structure):
    _fields_ = (("count", ctypes.c_int), ("text", ctypes.c_char_p))


def test_memory_of_ctypes() -> None:
    def change(it: Any) -> None:
        it.pair.count, it.pair.values[1], it.shared.value = 3, 0.5, 7

    def shown(it: Any) -> Any:
        return it.pair.count, it.pair.values[1], it.shared.value

    assert not goes_back(change, shown, pair=Pair(), shared=multiprocessing.Value("i", 1)).known


@pytest.mark.parametrize("value", [Pointing(1, b"text"), ctypes.c_void_p(5), (ctypes.c_char * 2**21)()])
def test_memory_that_is_large_or_holds_addresses_is_named(value: Any) -> None:
    records, inexact = recorder()
    holder = type("Holder", (), {})()
    holder.value = value
    records.take([Root(holder, "it")], ANCHORS).put_back(inexact.report)
    assert list(inexact.known) == ["it.value"]


class Local(threading.local):
    __slots__ = ("slot",)

    def __init__(self) -> None:
        self.slot, self.count = 1, 1


class Text(str):
    __slots__ = ("slot",)


def test_slots_of_all_kinds() -> None:
    text = Text("text")
    text.slot = 1  # type: ignore[attr-defined]

    def change(it: Any) -> None:
        it.local.slot = it.local.count = it.text.slot = 2

    def shown(it: Any) -> Any:
        return it.local.slot, it.local.count, it.text.slot

    assert not goes_back(change, shown, local=Local(), text=text).known


def test_a_leaf_that_became_a_part_of_a_graph() -> None:
    def change(it: Any) -> None:
        it.plain += torch.ones(2, requires_grad=True)
        it.marked.data = torch.zeros(3)

    def shown(it: Any) -> Any:
        return [(each.requires_grad, each.is_leaf, each.tolist()) for each in (it.plain, it.marked)]

    marked: Any = torch.ones(2, requires_grad=True)
    marked.sum().backward()
    assert not goes_back(change, shown, plain=torch.zeros(2), marked=marked).known
    assert marked.grad.tolist() == [1, 1]


def test_a_tensor_that_is_learnt_later() -> None:
    def change(it: Any) -> None:
        it.tensor.requires_grad_().sum().backward()

    assert not goes_back(change, lambda it: (it.tensor.requires_grad, it.tensor.grad), tensor=torch.zeros(2)).known


def test_a_tensor_that_learns_from_some_step_on() -> None:
    """It goes back to a step in which it did already, whether or not its values have changed since."""
    holder = type("Holder", (), {})()
    holder.tensor = torch.zeros(2)
    records, inexact = recorder()
    roots = [Root(holder, "it")]
    records.take(roots, ANCHORS)
    holder.tensor.requires_grad_()
    records.take(roots, ANCHORS)
    holder.tensor.sum().backward()
    taken = records.take(roots, ANCHORS)
    holder.tensor.sum().backward()
    taken.put_back(inexact.report)
    assert holder.tensor.requires_grad
    assert holder.tensor.grad.tolist() == [1, 1]
    assert not inexact.known


def test_roots_are_known_however_many_objects_there_are(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(capture, "_ALL", 1)
    holders = [type("Holder", (), {})() for _ in range(2)]
    for holder in holders:
        holder.objects = [[number] for number in range(5)]
    records, inexact = recorder()
    roots = [Root(holder, f"it{number}") for number, holder in enumerate(holders)]
    taken = records.take(roots, ANCHORS)
    assert [taken.attributes_of(root).names for root in roots] == [["objects"], ["objects"]]
    assert list(inexact.known) == ["it0.objects", "it1.objects"]


def test_a_dict_whose_methods_say_something_else() -> None:
    class Strict(dict[str, int]):
        def get(self, key: str) -> int:  # type: ignore[override]
            return self[key]

    def change(it: Any) -> None:
        it.strict["a"] += 1

    assert not goes_back(change, lambda it: it.strict["a"], strict=Strict(a=1)).known


def test_long_chains_and_odd_variables(monkeypatch: pytest.MonkeyPatch) -> None:
    lines = [f"def f{number}(): return f{number + 1}()" for number in range(2000)]
    lines += ["def f2000():", "    global COUNT", "    COUNT = 1", "class Calls:", "    go = f0"]
    module = types.ModuleType("chained")
    module.__file__ = __file__
    exec(compile("\n".join(lines), __file__, "exec"), vars(module))
    monkeypatch.setitem(sys.modules, "chained", module)
    found = UserCode([], [vars(module)["Calls"]])
    assert found.problem == ""
    assert found.written == {"COUNT"}


class Writes:
    """Code that writes to variables, and to files."""

    def __init__(self) -> None:
        self.own, self.shape = 1, ()

    def of_a_module(self, settings: Any) -> None:
        settings.rate = 1
        os.another = 2  # type: ignore[attr-defined]
        globals()["third"] = 3

    def to_files(self, path: str, rows: Path) -> None:
        with open(path, "a") as file, rows.open("ab+") as other:
            file.write("1")
            other.write(b"1")

    def by_a_library(self, path: str, table: Any) -> None:
        table.to_csv(path, mode="a")

    def not_to_files(self, path: str) -> str:
        with open(path) as file:
            return file.read() + "all"


def test_what_code_writes_to() -> None:
    found = UserCode([], [Writes])
    assert found.problem == ""
    assert {"rate", "another", "third"} <= found.written
    assert found.written.isdisjoint({"own", "shape"})
    assert sorted(name.partition(" ")[0] for name in found.appending) == ["by_a_library", "to_files"]


def test_relative_imports_inside_of_functions(monkeypatch: pytest.MonkeyPatch) -> None:
    sources = {"task": "", "task.counters": "N = 0\ndef bump():\n    global N\n    N += 1\n"}
    sources["task.model"] = "class Model:\n    def step(self):\n        from .counters import bump\n        bump()\n"
    for name, source in sources.items():
        module: Any = types.ModuleType(name)
        module.__file__, module.__package__ = __file__, "task"
        exec(compile(source, __file__, "exec"), vars(module))
        monkeypatch.setitem(sys.modules, name, module)
    found = UserCode([], [vars(sys.modules["task.model"])["Model"]])
    assert "N" in found.names["task.counters"]


class Refuses:
    def __getattribute__(self, name: str) -> Any:
        if name == "__dict__":
            raise RuntimeError("not configured")
        return object.__getattribute__(self, name)


def test_what_cannot_be_looked_at_is_named() -> None:
    class Gone:
        """Nothing refers to it when it is looked at."""

    def change(it: Any) -> None:
        it.count += 1

    inexact = goes_back(change, lambda it: it.count, count=1, refuses=Refuses(), dead=weakref.proxy(Gone()))
    assert list(inexact.known) == ["it.refuses"]


def test_a_dataset_in_memory_takes_no_room_of_the_models() -> None:
    records, inexact = recorder()
    holder = type("Holder", (), {})()
    holder.seen = []
    roots = [Root(holder, "it"), Root(sys.modules[__name__], "globals", only=("DATASET",), most=100)]
    taken = records.take(roots, ANCHORS)
    holder.seen.append(1)
    taken.put_back(inexact.report)
    assert holder.seen == []
    assert list(inexact.known) == ["globals.DATASET"]


class Level(enum.Enum):
    LOW = 1
    HIGH = 2
    SEEN = [0]


class WithClasses(L.LightningModule):
    """Writes to attributes of classes, and to members of enumerations, that no global name leads to."""

    class Settings:
        count = 0

        class Mode(enum.Enum):
            FAST = 1
            SLOW = 2

    def __init__(self) -> None:
        super().__init__()
        self.held: Any = Held
        self.table: Any = {"first": InTable}

    def advance(self) -> tuple[int, ...]:
        slow: Any = self.Settings.Mode.SLOW
        slow.hits = getattr(slow, "hits", 0) + 1
        self.Settings.count += 1
        self.held.count += 1
        self.table["first"].count += 1
        NAMED["second"].count += 1
        return slow.hits, self.Settings.count, self.held.count, self.table["first"].count, NAMED["second"].count


def test_classes_that_no_global_name_leads_to() -> None:
    module, other = WithClasses(), WithClasses()
    copies = Copies(module)
    beginning = copies.take()
    module.advance()
    taken = copies.take()
    expected = [module.advance() for _ in range(3)]
    copies.put(taken)
    assert [module.advance() for _ in range(3)] == expected == [(2,) * 5, (3,) * 5, (4,) * 5]
    sent = copies.private()
    copies.put(beginning)
    assert not hasattr(WithClasses.Settings.Mode.SLOW, "hits")
    replaced = put_sent(other, sent)
    assert other.advance() == (5,) * 5
    assert not {**copies.inexact.known, **replaced.inexact.known}
    copies.put(beginning)


class WithMembers(L.LightningModule):
    """Writes to members of an enumeration, to the environment, and to a handler of logs."""

    def __init__(self) -> None:
        super().__init__()
        self.counter: Any = Counter()

    def advance(self) -> tuple[int, ...]:
        high: Any = Level.HIGH
        Level.SEEN.value[0] += 1
        high.hits = getattr(high, "hits", 0) + 1
        os.environ["TURN"] = str(int(os.environ.get("TURN", "0")) + 1)
        self.counter.emit(None)
        os.environ["RANKING"] = os.environ["TURN"]  # says nothing of a rank
        return high.hits, int(os.environ["TURN"]), self.counter.records, Level.SEEN.value[0], int(os.environ["RANKING"])


class Counter(logging.Handler):
    records = 0

    def emit(self, record: Any) -> None:
        self.records += 1


def holds_count() -> Any:
    class Made:
        count = 0

    return Made


Held, InTable = holds_count(), holds_count()
NAMED = {"second": holds_count()}


def forget() -> None:
    vars(Level.HIGH).pop("hits", None)
    os.environ.pop("TURN", None)
    os.environ.pop("RANKING", None)
    Level.SEEN.value[0] = 0


@pytest.fixture
def forgets() -> Iterator[None]:
    yield
    forget()


@pytest.mark.usefixtures("forgets")
def test_members_of_an_enumeration_and_the_environment() -> None:
    module, other = WithMembers(), WithMembers()
    copies = Copies(module)
    beginning = copies.take()
    module.advance()
    taken = copies.take()
    os.environ["LOCAL_SOMETHING"] = "1"
    expected = [module.advance() for _ in range(3)]
    assert expected[0] == (2, 2, 2, 2, 2)
    copies.put(taken)
    assert os.environ.pop("LOCAL_SOMETHING") == "1"  # which rank a process is does not go back
    assert [module.advance() for _ in range(3)] == expected
    sent = copies.private()
    copies.put(beginning)
    assert "TURN" not in os.environ
    assert not hasattr(Level.HIGH, "hits")
    replaced = put_sent(other, sent)
    assert other.advance() == (5, 5, 5, 5, 5)
    assert not {**copies.inexact.known, **replaced.inexact.known}


def test_the_environment_of_code_that_does_not_name_it(monkeypatch: pytest.MonkeyPatch) -> None:
    module = L.LightningModule()
    copies = Copies(module)
    taken = copies.take()
    monkeypatch.setenv("OF_A_LIBRARY", "1")
    copies.put(taken)
    assert os.environ["OF_A_LIBRARY"] == "1"


@pytest.mark.usefixtures("forgets")
def test_the_environment_in_a_batch_that_is_done_again_and_again() -> None:
    module = WithMembers()
    copies = Copies(module)
    taken = copies.take()
    for _ in range(3):
        os.environ["TURN"] = "1"
        later = copies.take()
        os.environ["TURN"] = "2"
        copies.put(later)
        assert os.environ["TURN"] == "1"
        copies.put(taken)
        assert "TURN" not in os.environ


UNIMPORTED = """
STEPS = 0

class Counts:
    seen = 0

    def count(self):
        global STEPS
        STEPS += 1
        Counts.seen += 1
"""


def test_a_module_that_is_loaded_from_a_path(tmp_path: Path) -> None:
    """Nothing in `sys.modules` leads to it; two of them have the same name."""
    items = list[Any]()
    for number in range(2):
        path = tmp_path / f"{number}" / "extension.py"
        path.parent.mkdir()
        path.write_text(UNIMPORTED)
        spec = importlib.util.spec_from_file_location("extension", path)
        assert spec is not None
        assert spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        items.append(module.Counts())

    class Holds(L.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.items = items

    model = Holds()
    copies = Copies(model)
    taken = copies.take()
    for item, times in zip(items, (1, 2), strict=True):
        for _ in range(times):
            item.count()
    assert [(type(item).seen, item.count.__func__.__globals__["STEPS"]) for item in items] == [(1, 1), (2, 2)]
    later = copies.private()
    copies.put(taken)
    assert [(type(item).seen, item.count.__func__.__globals__["STEPS"]) for item in items] == [(0, 0), (0, 0)]
    put_sent(model, later)
    assert [(type(item).seen, item.count.__func__.__globals__["STEPS"]) for item in items] == [(1, 1), (2, 2)]


@pytest.mark.parametrize("source", [UNIMPORTED, "TABLE = [0]", "RATE = 0.1\n\ndef f():\n    return RATE"])
def test_a_module_that_is_imported_in_training(source: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is followed from then on. A batch that is done again does not import it again; constants do not matter."""
    name = f"late_{tmp_path.name}"
    (tmp_path / f"{name}.py").write_text(source)
    monkeypatch.syspath_prepend(tmp_path)
    copies = Copies(WithClasses())
    beginning = copies.take()
    late = importlib.import_module(name)
    copies.put(beginning)
    varies = [f"globals of {name}"] if "RATE" not in source else []
    assert [*copies.inexact.known] == varies
    taken = copies.take()
    (variable,) = {"STEPS", "TABLE", "RATE"} & vars(late).keys()
    former = getattr(late, variable)
    setattr(late, variable, 5)
    copies.put(taken)
    assert getattr(late, variable) is former
    assert [*copies.inexact.known] == varies
