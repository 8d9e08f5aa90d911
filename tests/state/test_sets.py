"""Sets go back with their members. Where code would see these in another order, that is said."""

from collections.abc import Callable
from typing import Any

import lightning as L
import pytest

from lightning_replica._compat.cpython import place_of_next
from tests.state.test_reachable import Copies, put_sent


class Module(L.LightningModule):
    def __init__(self, members: set[Any]) -> None:
        super().__init__()
        self.members = members


def take_and_add(members: set[Any]) -> None:
    members.add(members.pop() * 31 % 1009)


def add(members: set[Any]) -> None:
    members.add(max(members) + 1)


def collide(members: set[Any]) -> None:
    """Leave members where they do not belong, because others were there when they came."""
    members.clear()
    members.update(range(8))
    members.update(8 + 1024 * n for n in range(20))
    for number in range(8):
        members.remove(number)


def test_whether_members_were_popped() -> None:
    members = set(range(10))
    assert place_of_next(members) == 0
    members.pop()
    assert place_of_next(members) == 1
    assert place_of_next(set(members)) == 0


@pytest.mark.parametrize(("change", "named"), [(add, False), (take_and_add, True)])
def test_order_of_numbers(change: Callable[[set[Any]], None], named: bool) -> None:
    module, other = Module(set(range(100))), Module(set(range(100)))
    copies = Copies(module)
    change(module.members)
    taken, before = copies.take(), list(module.members)
    change(module.members)
    copies.put(taken)
    assert set(before) == module.members
    assert named or before == list(module.members)
    assert bool(copies.inexact.known) == named
    change(module.members)
    assert bool(put_sent(other, copies.private()).inexact.known) == named
    assert other.members == module.members


def grow_and_shrink(members: set[Any]) -> None:
    members.update(range(200, 400))
    members.difference_update(range(201, 400))


def test_order_in_a_table_that_has_grown() -> None:
    module, other = Module({13, 21, 24}), Module({13, 21, 24})
    copies = Copies(module)
    grow_and_shrink(module.members)
    taken, before = copies.take(), list(module.members)
    assert before != list({13, 21, 24, 200})
    module.members.clear()
    copies.put(taken)
    replaced = put_sent(other, copies.private(taken))
    assert list(module.members) == list(other.members) == before
    assert not {**copies.inexact.known, **replaced.inexact.known}


def test_another_order_is_named() -> None:
    module = Module(set())
    copies = Copies(module)
    collide(module.members)
    taken, before = copies.take(), list(module.members)
    module.members.clear()
    copies.put(taken)
    assert set(before) == module.members
    assert (before == list(module.members)) == (not copies.inexact.known)
    for finding in copies.inexact.known.values():
        assert "another order" in finding.why


@pytest.mark.parametrize("seed", [None, "3"])
def test_order_of_texts_counts_where_python_keeps_it(seed: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("PYTHONHASHSEED", raising=False)
    if seed is not None:
        monkeypatch.setenv("PYTHONHASHSEED", seed)
    module = Module({"a", "b", "c"})
    copies = Copies(module)
    module.members.pop()
    taken = copies.take()
    module.members.pop()
    copies.put(taken)
    assert bool(copies.inexact.known) == (seed is not None)
