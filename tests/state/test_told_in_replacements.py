"""What a replacement cannot make as it was is told by name."""

import contextlib
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import lightning as L
import numpy as np
import pytest

from tests.state.test_reachable import Copies, put_sent


class Item:
    """Has attributes."""


def _class_of_one_name(number: int) -> type:
    class Made:
        def __init__(self) -> None:
            self.number = number

    return Made


class _Bytes(bytearray):
    pass


class _Number(np.float64):
    pass


def _shares(_: Item) -> Any:
    one, other = Item(), Item()
    one.__dict__ = other.__dict__
    return [one, other]


def _shown(_: Item) -> Any:
    objects = np.array([[0], [1]], dtype=object)
    return [objects, objects[1:]]


@contextlib.contextmanager
def _block() -> Iterator[None]:
    yield


CASES: dict[str, Callable[[Item], Any]] = {
    "several classes of one name": lambda _: [_class_of_one_name(1)(), _class_of_one_name(2)()],
    "a `__dict__` of two objects": _shares,
    "a weak reference with a callback": lambda item: weakref.ref(item, lambda _: None),
    "a subclass of bytearray": lambda _: _Bytes(b"1"),
    "a subclass of a number of NumPy": lambda _: _Number(1.0),
    "a part of an array of objects": _shown,
    "a static method": lambda _: staticmethod(len),
    "a generator": lambda _: (n for n in range(2)),
    "an open block": lambda _: _block(),
}


class Module(L.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.item = Item()
        self.made: Any = None


@pytest.mark.parametrize("case", CASES)
def test_what_cannot_be_sent_is_named(case: str) -> None:
    module, other = Module(), Module()
    copies = Copies(module)
    module.made = CASES[case](module.item)
    sent = copies.private()
    replaced = put_sent(other, sent)
    told = [*copies.inexact.known, *replaced.inexact.known]
    assert told
    assert all(name.startswith("module.made") for name in told)
