"""Objects whose content lies in C, as tables of pandas: they go back, and to a replacement."""

import datetime
import decimal
import operator
import weakref
import xml.etree.ElementTree
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import lightning as L
import numpy as np
import pandas as pd
import pytest
import torch

from lightning_replica.state.objects import kinds
from lightning_replica.state.objects.kinds import Kind, kind_of, kind_of_class
from lightning_replica.state.objects.rebuilding import are_alike, parts_of
from tests.state.test_reachable import Copies, put_sent

Change = Callable[[Any, int], Any]


class Module(L.LightningModule):
    def __init__(self, made: Any, change: Change) -> None:
        super().__init__()
        self.it, self.same, self.change, self.turn = made, [made], change, 0
        self.late: Any = None

    def advance(self) -> str:
        self.turn += 1
        self.it = self.change(self.it, self.turn)
        self.late = self.change(type(self).made_late(self.it), self.turn)
        return f"{text_of(self.it)} {text_of(self.same[0])} {text_of(self.late)}"

    @staticmethod
    def made_late(like: Any) -> Any:
        return like.copy()


def text_of(value: Any) -> str:
    if isinstance(value, (pd.DataFrame, pd.Series)):
        return f"{value.to_csv()} {value.dtypes} {value.attrs}"
    return repr(value)


def a_table() -> pd.DataFrame:
    return pd.DataFrame(
        {
            "number": [0.5, 1.5],
            "count": [1, 2],
            "text": ["a", "b"],
            "any": [[1], None],
            "time": pd.date_range("2020-01-01", periods=2, tz="UTC"),
            "kind": pd.Categorical(["u", "v"]),
            "maybe": pd.array([1, None], dtype="Int64"),
            "span": pd.period_range("2020", periods=2, freq="D"),
        }
    )


def in_a_cell(table: Any, turn: int) -> Any:
    table.loc[0, "number"] += turn
    table.loc[1, "count"] += turn
    table.loc[0, "text"] = f"t{turn}"
    return table


def in_an_object(table: Any, turn: int) -> Any:
    table.loc[0, "any"].append(turn)
    return table


def with_a_row(table: Any, turn: int) -> Any:
    table.loc[len(table)] = table.loc[0]
    return table


def with_a_column(table: Any, turn: int) -> Any:
    table[f"column {turn}"] = turn
    table.attrs["turn"] = turn
    return table


def without_a_column(table: Any, turn: int) -> Any:
    del table[table.columns[0]]
    return table


def as_another(table: Any, turn: int) -> Any:
    return pd.concat([table, table.iloc[:1]]).reset_index(drop=True)


def of_a_series(series: Any, turn: int) -> Any:
    series.iloc[0] += turn
    series.name = f"name {turn}"
    return series


def with_more_labels(series: Any, turn: int) -> Any:
    series[f"label {turn}"] = turn
    return series


CASES: dict[str, tuple[Callable[[], Any], Change]] = {
    "cells": (a_table, in_a_cell),
    "objects": (a_table, in_an_object),
    "rows": (a_table, with_a_row),
    "columns": (a_table, with_a_column),
    "fewer columns": (a_table, without_a_column),
    "another table": (a_table, as_another),
    "two levels": (
        lambda: a_table().set_index(["text", "count"]),
        lambda table, turn: table * 1 if turn < 0 else table,
    ),
    "series": (lambda: pd.Series([0.0, 1.0]), of_a_series),
    "labels": (lambda: pd.Series([0.0, 1.0], index=["a", "b"]), with_more_labels),
    "times": (lambda: pd.date_range("2020-01-01", periods=3), lambda index, turn: index + pd.Timedelta(days=turn)),
    "index": (lambda: pd.Index([1, 2]), lambda index, turn: index.append(pd.Index([turn]))),
    "spans": (lambda: pd.interval_range(0, 3), lambda index, turn: index[::-1]),
}
EACH = pytest.mark.parametrize(("make", "change"), CASES.values(), ids=CASES)


@EACH
def test_a_batch_that_is_done_again(make: Callable[[], Any], change: Change) -> None:
    module = Module(make(), change)
    copies = Copies(module)
    module.advance()
    taken = copies.take()
    expected = [module.advance() for _ in range(3)]
    for _ in range(2):
        copies.put(taken)
        assert [module.advance() for _ in range(3)] == expected
    assert not copies.inexact.known


@EACH
def test_a_replacement(make: Callable[[], Any], change: Change) -> None:
    module, other = Module(make(), change), Module(make(), change)
    copies = Copies(module)
    for _ in range(3):
        module.advance()
    replaced = put_sent(other, copies.private())
    assert [other.advance() for _ in range(3)] == [module.advance() for _ in range(3)]
    assert not replaced.inexact.known
    assert not copies.inexact.known


def test_what_does_not_change_stays_the_same_object() -> None:
    module = Module(a_table(), lambda table, turn: table)
    copies = Copies(module)
    table, manager = module.it, module.it._mgr
    taken = copies.take()
    copies.put(taken)
    assert module.it is table is module.same[0]
    assert table._mgr is manager


class Node(xml.etree.ElementTree.Element):
    """Of a class in C, with attributes besides."""

    visits = 0

    def visited(self) -> int:
        return self.visits


def visited(node: Any, turn: int) -> Any:
    node.visits += turn
    node.set("turn", str(turn))
    node.append(Node(f"child{turn}"))
    return node


def test_an_object_in_c_with_attributes() -> None:
    module: Any = L.LightningModule()
    module.it = Node("root")
    assert kind_of(module.it) is Kind.REBUILT
    copies = Copies(module)
    visited(module.it, 1)
    taken = copies.take()
    visited(module.it, 2)
    copies.put(taken)
    assert (module.it.visits, module.it.attrib, len(module.it)) == (1, {"turn": "1"}, 1)
    assert not copies.inexact.known


def test_what_cannot_be_made_elsewhere_is_named() -> None:
    module: Any = L.LightningModule()
    other, module.it = L.LightningModule(), None
    copies = Copies(module)
    module.it = operator.itemgetter(1)
    assert put_sent(other, copies.private()).inexact.known["module.it"].scope == "once"
    assert getattr(other, "it", None) is None


def test_only_what_is_known_is_called() -> None:
    """A file that somebody else has written names no function that does something else."""
    module, other = (Module(a_table(), lambda table, turn: table) for _ in range(2))
    copies = Copies(module)
    module.it["more"] = 1
    called: list[Any] = []
    sent = copies.private()
    text = repr(sent)
    assert "pandas.core.internals.managers:BlockManager" in text

    def replaced(value: Any) -> Any:
        if isinstance(value, list):
            return [replaced(each) for each in value]
        return "operator:methodcaller" if value == "pandas._libs.internals:_unpickle_block" else value

    found = put_sent(other, replaced(sent)).inexact.known
    assert not called
    assert any("cannot be made in a replacement" in finding.why for finding in found.values())


def test_parts() -> None:
    assert parts_of(zlib.compressobj()) is None
    assert parts_of(operator.itemgetter(1, 2)) == (operator.itemgetter, (1, 2), None)
    assert kind_of_class(
        np.lib.stride_tricks.DummyArray if hasattr(np.lib.stride_tricks, "DummyArray") else Module
    ) is (Kind.OBJECT)
    assert are_alike((1, [2, {"a": slice(1)}]), (1, [2, {"a": slice(1)}]))
    for other in ((1, [2, {"a": slice(2)}]), (1, [2]), [1, [2, {"a": slice(1)}]], (1.0, [2, {"a": slice(1)}])):
        assert not are_alike((1, [2, {"a": slice(1)}]), other)
    assert are_alike(np.ones(2), np.ones(2))
    assert not are_alike(np.ones(2), np.ones(2, dtype=np.float32))


def rolled_back(change: Callable[[Any], Any], **attributes: Any) -> tuple[Any, Copies]:
    """Returns a module that a change was taken back from."""
    module: Any = L.LightningModule()
    for name, value in attributes.items():
        setattr(module, name, value)
    copies = Copies(module)
    taken = copies.take()
    change(module)
    copies.put(taken)
    return module, copies


def test_who_refers_to_an_object_that_is_made_again() -> None:
    node = Node("root")
    kept, before = [node], id(node)  # the list is not followed, and so no other object can have the same `id`
    module, copies = rolled_back(
        lambda module: module.it.set("turn", "1"),
        it=node,
        keys={node: 3, (node, 1): 4},
        members={node},
        lists=[[node], (node,)],
        slots=Slotted(node),
        read=lambda: node,
    )
    again = module.it  # as the variable of this function, which `read` refers to
    assert id(again) != before
    assert again.attrib == {}
    assert list(module.keys) == [again, (again, 1)]
    assert again in module.keys
    assert kept[0] not in module.keys
    assert module.members == {again}
    assert module.lists == [[again], (again,)]
    assert module.slots.it is again is module.read()
    assert not copies.inexact.known


def test_a_method_written_in_c_is_bound_to_the_object_that_was_made_again() -> None:
    node: Any = Node("root")
    module, copies = rolled_back(lambda module: module.it.set("turn", "1"), it=node, read=node.get)
    assert module.read.__self__ is module.it is not node
    assert module.read("turn") is None
    assert not copies.inexact.known


@pytest.mark.parametrize("kind", ["method", "weak", "itself"])
def test_what_keeps_the_former_object_is_told(kind: str) -> None:
    node: Any = Node("root")
    made: dict[str, Callable[[], Any]] = {
        "method": lambda: node.visited,
        "weak": lambda: weakref.ref(node),
        "itself": int,
    }
    if kind == "itself":
        node.me = node
    _, copies = rolled_back(lambda module: module.it.set("turn", "1"), it=node, other=made[kind]())
    assert "refer to the former one" in " ".join(finding.why for finding in copies.inexact.known.values())


def test_a_child_that_knows_its_parent() -> None:
    node, child = Node("root"), Node("child")
    child.parent = node  # type: ignore[attr-defined]
    node.append(child)
    module, copies = rolled_back(lambda module: module.it.set("turn", "1"), it=node)
    assert module.it[0].parent is module.it is not node
    assert not copies.inexact.known


def test_classes_of_arrays_and_frozen_sets() -> None:
    class Local(frozenset):  # type: ignore[type-arg]
        """Another process does not know it, and cannot make it: it has a body."""

        def total(self) -> int:
            return sum(self)

    module, other = (Module(Node("a"), lambda it, turn: it) for _ in range(2))
    copies = Copies(module)
    module.late = [Frozen([1]), pd.Timedelta("1ns"), datetime.timedelta(1)]
    found = put_sent(other, copies.private()).inexact.known
    assert (type(other.late[0]), other.late[0], other.late[2]) == (Frozen, {1}, datetime.timedelta(1))
    assert list(found) == ["module.late[1]"]
    for late in (np.zeros(1).view(OwnArray), Local([1])):
        module.late, other.late = late, None
        assert "cannot be made" in put_sent(other, copies.private()).inexact.known["module.late"].why


class OwnArray(np.ndarray):
    """Of the user's own."""


class Frozen(frozenset):  # type: ignore[type-arg]
    """Of the user's own."""


def test_the_context_of_decimals_is_told_as_before() -> None:
    _, copies = rolled_back(lambda module: setattr(module.it, "prec", 5), it=decimal.Context())
    assert "has changed and cannot be restored" in copies.inexact.known["module.it"].why


class Slotted:
    __slots__ = ("it",)

    def __init__(self, it: Any) -> None:
        self.it = it


def test_iterators_in_slots_go_back() -> None:
    module, _ = rolled_back(lambda module: next(module.it.it), it=Slotted(iter([1, 2])))
    assert next(module.it.it) == 1


class Refuses(Node):
    """Cannot be made again."""

    def __reduce__(self) -> Any:
        return refuse, (self.tag, dict(self.attrib))


def refuse(*_: Any) -> None:
    raise ValueError("no")


def test_what_cannot_be_made_again_keeps_nothing_else_from_going_back() -> None:
    def change(module: Any) -> None:
        module.it.set("a", "1")
        module.count = 2

    module, copies = rolled_back(change, it=Refuses("a"), count=1)
    assert module.count == 1
    assert "ValueError: no" in copies.inexact.known["module.it"].why


class Keyed(Node):
    """Has keys that are no texts."""

    def __reduce_ex__(self, protocol: Any) -> Any:
        return Keyed, (self.tag,), dict(vars(self))

    def __setstate__(self, state: Any) -> None:
        vars(self).update(state)


class Unreadable:
    def __repr__(self) -> str:
        raise ValueError("no")


def test_keys_of_any_kind() -> None:
    module, other = (Module(Keyed("a"), lambda it, turn: it) for _ in range(2))
    copies = Copies(module)
    module.it.table = {frozenset((1,)): 3}
    put_sent(other, copies.private())
    assert other.it.table == {frozenset((1,)): 3}
    module.it.other = {Unreadable(): 4}
    copies.put(copies.take())


def test_numbers_of_numpy_that_are_those_of_python_too() -> None:
    module, other = (Module(Node("a"), lambda it, turn: it) for _ in range(2))
    copies = Copies(module)
    module.late = [np.complex128(1 + 2j), np.float64(3), 4j]
    assert not put_sent(other, copies.private()).inexact.known
    assert list(map(type, other.late)) == [np.complex128, np.float64, complex]
    assert other.late == module.late


class Fresh:
    """Gives an array that it makes anew each time, as a tree of SciPy does."""

    __slots__ = ("hidden",)

    def __init__(self, values: Any) -> None:
        self.hidden = bytes(values)

    def __reduce__(self) -> Any:
        return Fresh, (np.frombuffer(self.hidden, dtype=np.uint8).copy(),)


def test_parts_that_are_new_each_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(kinds._known, Fresh, Kind.REBUILT)
    module, other = (Module(Fresh([1, 2]), lambda it, turn: it) for _ in range(2))
    module.same = other.same = []
    copies = Copies(module)
    module.it = Fresh([3, 4])
    put_sent(other, copies.private())
    assert other.it.hidden == b"\3\4"


def test_no_other_class_is_made_for_an_object_that_is_there(tmp_path: Path) -> None:
    module: Any = L.LightningModule()
    module.it = Node("a")
    victim = tmp_path / "victim"
    new = [["", ["class", "numpy:memmap", None]], ["", str(victim)], ["", "uint8"], ["", "w+"], ["", 0], ["", 3]]
    cls = f"{Node.__module__}:Node"
    for maker in ("copyreg:__newobj__", "numpy:memmap", "os:system"):
        sent = [["module", [["it", ["rebuilt", [0, None], cls, maker, ["tuple", new], ["", None]]]]]]
        found = put_sent(module, sent).inexact.known
        assert found["module.it"].why == f"a {cls} cannot be made in a replacement"
    assert not victim.exists()
    assert type(module.it) is Node


def test_arrays_that_cannot_be_written_to() -> None:
    base, locked, tensor = np.zeros(1), np.zeros(2), torch.zeros(1)
    locked.flags.writeable = False

    def change(module: Any) -> None:
        base[0] = 5
        tensor[0] = 6
        locked.flags.writeable = True
        locked[0] = 7
        locked.flags.writeable = False

    shown = {"wide": np.broadcast_to(base, (3,)), "locked": locked, "expanded": tensor.expand(3)}
    module, copies = rolled_back(change, **shown, base=base, tensor=tensor)
    assert [base[0], locked[0], float(tensor[0]), module.wide[2], float(module.expanded[1])] == [0] * 5
    assert not locked.flags.writeable
    assert not copies.inexact.known


def test_a_table_that_shows_the_memory_of_another_one() -> None:
    """pandas copies it when one of them is written to, also after a batch is done again, and in a replacement."""

    def made() -> Any:
        module: Any = L.LightningModule()
        module.it, module.best, module.column = a_table(), None, None
        return module

    def shown(module: Any) -> list[str]:
        module.it.loc[0, "number"] = 9
        return [text_of(each) for each in (module.it, module.best, module.column)]

    module, other = made(), made()
    copies = Copies(module)
    module.best, module.column = module.it.copy(deep=False), module.it["number"]
    taken, sent = copies.take(), copies.private()
    module.it.insert(0, "new", 1)
    copies.put(taken)
    put_sent(other, sent)
    expected = made()
    expected.best, expected.column = expected.it.copy(deep=False), expected.it["number"]
    if pd.__version__ < "3":  # before, the column is written to
        expected.column = expected.it["number"].copy()
        expected.best = expected.it.copy()
    assert shown(other) == shown(expected)
    if pd.__version__ >= "3":
        assert shown(module) == shown(expected)


def test_what_only_its_pickled_form_shows_is_told_while_training_goes_on() -> None:
    module: Any = L.LightningModule()
    module.it = Node("a")
    module.it.text = "x" * 5000  # more than is asked for in each step
    copies = Copies(module)
    copies.take()
    module.it.set("turn", "1")
    for _ in range(256):
        copies.take()
    assert copies.inexact.known["module.it"].scope == "fault"
