"""Modules that have only settings are compared with the snapshot before, and not copied again."""

from typing import Any

import torch
from hypothesis import example, given
from hypothesis import strategies as st

from lightning_replica._compat.tree import Tree
from lightning_replica.state.attributes import Copies
from tests.state.test_attributes import Module, take

_GONE = object()
VALUES = [
    _GONE,
    0,
    False,
    0.0,
    -0.0,
    1,
    True,
    "a",
    None,
    (),
    (1, 2),
    (torch.ones(1),),
    [],
    [1],
    torch.zeros(1),
    object(),
]
CHANGES = st.lists(st.tuples(st.sampled_from(["calls", "begun", "new"]), st.sampled_from(VALUES)), max_size=3)


def texts(values: dict[str, Any]) -> dict[str, str]:
    """By type and value; of an object, which is no state, nothing is kept."""
    return {name: f"{type(value).__name__} {value}" for name, value in values.items()}


@given(st.lists(CHANGES, max_size=5))
@example([[], [("last", _GONE), ("new", None)]])
@example([[("new", VALUES[-1])], [("new", 1)]])
@example([[], [("calls", 1)]])
def test_a_module_of_settings_only_is_looked_at_in_every_snapshot(snapshots: list[list[tuple[str, Any]]]) -> None:
    """What the snapshot before has found of a module may be taken again only if nothing has changed."""
    module = Module()
    tree = Tree.of(module)
    number = tree.modules.index(module.cell)
    copies, first = Copies(module), texts(take(module).values[number])
    for changes in snapshots:
        for name, value in changes:
            vars(module.cell).pop(name, None) if value is _GONE else setattr(module.cell, name, value)
        taken = copies.take(tree)
        found = texts(taken.values[number])
        now = {name: vars(module.cell)[name] for name in (*first, "new") if name in vars(module.cell)}
        now = {name: value for name, value in now.items() if type(value) is not object}
        assert found.keys() == now.keys()
        atoms = {name for name, value in now.items() if not isinstance(value, (tuple, list, torch.Tensor))}
        assert {n: found[n] for n in atoms} == {n: text for n, text in texts(now).items() if n in atoms}
        changed = taken.changed.get(number, {})
        assert {n for n in atoms if n in changed} == {n for n in atoms if found[n] != first.get(n)}
