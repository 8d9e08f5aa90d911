"""Hooks of the user's on a module, a tensor, or all modules: functions that are called in forward and backward.

A hook that is registered in training is registered once more when the batch is repeated, and one that removes itself
is missing then. So ranks that go back put the tables of hooks back. A function cannot be sent: of hooks that a
replacement lacks, `names_of` tells the names.
"""

import functools
import operator
import types
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Final, TypeAlias

from torch import Tensor, nn
from torch.nn.modules import module as all_modules

from lightning_replica._compat.torch import GLOBAL_HOOKS, registered_hooks
from lightning_replica._compat.tree import Tree

_TABLES: Final = ("_forward_pre_hooks", "_forward_hooks", "_backward_pre_hooks", "_backward_hooks")
_SETTINGS: Final = ("_forward_pre_hooks_with_kwargs", "_forward_hooks_with_kwargs", "_forward_hooks_always_called")
_OF_MODULES: Final = (*_TABLES, *_SETTINGS)
_OF_TENSORS: Final = ("_backward_hooks", "_post_accumulate_grad_hooks")
_tables_of_module = operator.itemgetter(*_OF_MODULES)
_NOT_USERS: Final = ("lightning_replica.", "torch.")

Table: TypeAlias = dict[int, Any]
"""Hooks, or what is known of them, by a number that no other hook of the process has."""


@dataclass(frozen=True)
class Hooks:
    """The hooks of modules and parameters, and of all modules of the process, at one point.

    Attributes:
        registered: How many hooks this process had registered by then.
        tables: The tables that had hooks of the user's, with their owners and names, and their entries.
    """

    registered: int
    tables: Sequence[tuple[Any, str, Table]]

    @classmethod
    def of(cls, tree: Tree, former: "Hooks | None" = None, tensors: Iterable[Tensor] = ()) -> "Hooks":
        """Return the hooks of a module's parts and of ``tensors``.

        It returns ``former`` if nothing has been registered or removed since; ``tensors`` is not iterated then.
        """
        registered = registered_hooks()
        if former is not None and former.registered == registered and former._hold():
            return former
        filled = list(_filled(tree, tensors))
        users = _of_users(filled)
        return cls(registered, [(owner, name, dict(table)) for owner, name, table in filled if users & table.keys()])

    def put_back(self, tree: Tree, tensors: Iterable[Tensor] = ()) -> None:
        """Register what was registered then, and nothing else. Hooks that are not the user's stay as they are.

        Args:
            tree: The module's parts.
            tensors: Other tensors that there were then.
        """
        then = {(id(owner), name): entries for owner, name, entries in self.tables}
        filled = list(_filled(tree, tensors))
        now = {(id(owner), name): (owner, name) for owner, name, _ in (*self.tables, *filled)}
        users = _of_users(self.tables) | _of_users(filled)
        for key, (owner, name) in now.items():
            table, before = getattr(owner, name), then.get(key, {})
            if table is None:
                continue  # of a parameter, it has been taken away
            wanted = {number: entry for number, entry in before.items() if number in users or number in table}
            wanted |= {number: entry for number, entry in table.items() if number not in users}
            if list(wanted.items()) != list(table.items()):
                table.clear()
                table.update(wanted)

    def _hold(self) -> bool:
        return all((getattr(owner, name) or {}).keys() == entries.keys() for owner, name, entries in self.tables)


def _filled(tree: Tree, tensors: Iterable[Tensor] = ()) -> Iterator[tuple[Any, str, Table]]:
    """Yield the tables that have entries. Of 3000 modules, most have none."""
    for module in tree.modules:
        for name, table in zip(_OF_MODULES, _tables_of_module(vars(module)), strict=True):
            if table:
                yield module, name, table
    for name in GLOBAL_HOOKS:
        if table := getattr(all_modules, name):
            yield all_modules, name, table
    for tensor in (*tree.parameters, *tensors):
        for name in _OF_TENSORS:
            if table := getattr(tensor, name, None):
                yield tensor, name, table


def _of_users(tables: Iterable[tuple[Any, str, Table]]) -> set[int]:
    """Return the numbers of the user's hooks. Some tables hold settings of hooks, by the same numbers."""
    return {number for *_, table in tables for number, hook in table.items() if _is_users(hook)}


class HookObjects:
    """The user's hooks as attributes of an object: they may be objects with a state, or functions that enclose one.

    Attributes:
        holder: What has the attributes, which are named after the owner of the hook and its place there.
    """

    def __init__(self) -> None:
        self.holder = types.SimpleNamespace()
        self._registered = -1

    def look(self, module: nn.Module, tree: Tree) -> None:
        """Make the holder have the hooks of a module, of its parts and of all modules, if there are new ones."""
        registered = registered_hooks()
        if registered == self._registered:
            return
        self._registered = registered
        found = [
            (owner, table, [*filter(_is_users, hooks.values())])
            for owner, table, hooks in _filled(tree)
            if table not in _SETTINGS
        ]
        former = [*vars(self.holder).values()]
        now = [hook for *_, hooks in found for hook in hooks]
        if len(now) == len(former) and all(map(operator.is_, now, former)):
            return
        names = {id(each): name for name, each in (*module.named_modules(), *module.named_parameters())}
        vars(self.holder).clear()
        for owner, table, hooks in found:
            name = names.get(id(owner)) or ("the module" if owner is module else "all modules")
            vars(self.holder).update({f"{name} {table} {place}": hook for place, hook in enumerate(hooks)})


def names_of(module: nn.Module, tensors: Iterable[tuple[str, Tensor]] = ()) -> dict[str, str]:
    """Return the names of the user's hooks, by what has them: modules, parameters, and ``tensors`` with names."""
    found: dict[str, str] = {}
    for name, each in (("all modules", all_modules), *module.named_modules(), *module.named_parameters(), *tensors):
        tables = [getattr(each, table, None) or {} for table in (*_TABLES, *_OF_TENSORS, *GLOBAL_HOOKS)]
        names = [_name_of(hook) for table in tables for hook in table.values() if _is_users(hook)]
        if names:
            found[name or "the module"] = ", ".join(names)
    return found


def _is_users(hook: Any) -> bool:
    return callable(hook) and not _name_of(hook).startswith(_NOT_USERS)


def _name_of(hook: Any) -> str:
    while isinstance(hook, functools.partial):
        hook = hook.func
    hook = getattr(hook, "__func__", hook)
    named = hook if hasattr(hook, "__qualname__") else type(hook)
    return f"{named.__module__}.{named.__qualname__}"
