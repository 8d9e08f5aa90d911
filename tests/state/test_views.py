"""Views of mappings go back with the mapping, and show the same one in a replacement."""

from collections.abc import Callable
from types import MappingProxyType
from typing import Any

import lightning as L
import pytest

from tests.state.test_reachable import Copies, put_sent

KINDS: dict[str, Callable[[dict[Any, Any]], Any]] = {
    "proxy": MappingProxyType,
    "keys": dict.keys,
    "values": dict.values,
    "items": dict.items,
}


class Module(L.LightningModule):
    """Only the view leads to the mapping; some code has kept it otherwise."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        mapping: dict[Any, Any] = {"seen": [0]}
        self.view = KINDS[kind](mapping)
        self.change = mapping.update
        self.body = vars(Module) if kind == "proxy" else None

    def advance(self) -> None:
        self.change({"seen": [len(str(self.view))], len(self.view): str(self.view)})


@pytest.mark.parametrize("kind", KINDS)
def test_a_batch_that_is_done_again(kind: str) -> None:
    module = Module(kind)
    copies = Copies(module)
    module.advance()
    view, taken, before = module.view, copies.take(), str(module.view)
    module.advance()
    assert str(module.view) != before
    copies.put(taken)
    assert module.view is view
    assert str(view) == before
    assert not copies.inexact.known


@pytest.mark.parametrize("kind", KINDS)
def test_a_replacement(kind: str) -> None:
    module, other = Module(kind), Module(kind)
    copies, view = Copies(module), other.view
    module.advance()
    replaced = put_sent(other, copies.private())
    assert other.view is view
    assert str(view) == str(module.view)
    other.advance()
    assert str(view) != str(module.view)  # it still shows what `update` changes
    assert not replaced.inexact.known


@pytest.mark.parametrize("kind", KINDS)
def test_a_view_that_came_later(kind: str) -> None:
    module, other = Module(kind), Module(kind)
    copies = Copies(module)
    mapping: dict[Any, Any] = {"new": [1]}
    module.view = KINDS[kind](mapping)
    module.change = mapping.update
    replaced = put_sent(other, copies.private())
    assert str(other.view) == str(module.view)
    other.advance()
    assert len(other.view) == 3
    assert not replaced.inexact.known
