"""Objects whose content lies in C, as tables of pandas: they go back, and to a replacement."""

import operator
import xml.etree.ElementTree
import zlib
from collections.abc import Callable
from typing import Any

import lightning as L
import numpy as np
import pandas as pd
import pytest

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
