"""Hooks of the user's on modules: functions that modules call in forward and backward.

A hook that is registered in training is registered once more when the batch is repeated, and one that removes itself
is missing then. So ranks that go back put the tables of hooks back. A function cannot be sent: of hooks that a
replacement lacks, `names_of` tells the names.
"""

import functools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Final, TypeAlias

from torch import nn

from lightning_replica._compat.torch import registered_hooks

_TABLES: Final = ("_forward_pre_hooks", "_forward_hooks", "_backward_pre_hooks", "_backward_hooks")
_FLAGS: Final = (
    "_forward_pre_hooks_with_kwargs",
    "_forward_hooks_with_kwargs",
    "_forward_hooks_always_called",
)
_OF_PARAMETERS: Final = "_post_accumulate_grad_hooks"
_NOT_USERS: Final = ("lightning_replica.", "torch.")

Table: TypeAlias = dict[int, Any]
"""Hooks, or what is known of them, by a number that no other hook of the process has."""


@dataclass(frozen=True)
class Hooks:
    """The hooks of modules at one point.

    Attributes:
        registered: How many hooks this process had registered by then.
        tables: All tables that had entries, and their entries.
    """

    registered: int
    tables: Sequence[tuple[Table, Table]]

    @classmethod
    def of(cls, modules: Sequence[nn.Module], former: "Hooks | None" = None) -> "Hooks":
        """Return the hooks of modules; ``former`` if nothing has been registered or removed since."""
        registered = registered_hooks()
        if former is not None and former.registered == registered and former._hold():
            return former
        found = (table for module in modules for table in _tables_of(module, (*_TABLES, *_FLAGS)))
        return cls(registered, [(table, dict(table)) for table in found if table])

    def put_back(self, modules: Sequence[nn.Module]) -> None:
        """Register what was registered then, and nothing else. Hooks that are not the user's stay as they are."""
        then = {id(table): entries for table, entries in self.tables}
        users = {number for _, entries in self.tables for number, hook in entries.items() if _is_users(hook)}
        tables = [table for module in modules for table in _tables_of(module, (*_TABLES, *_FLAGS))]
        users |= {number for table in tables for number, hook in table.items() if _is_users(hook)}
        for table in tables:
            before = then.get(id(table), {})
            wanted = {number: entry for number, entry in before.items() if number in users or number in table}
            wanted |= {number: entry for number, entry in table.items() if number not in users}
            if list(wanted.items()) != list(table.items()):
                table.clear()
                table.update(wanted)

    def _hold(self) -> bool:
        return all(table.keys() == entries.keys() for table, entries in self.tables)


def names_of(module: nn.Module) -> dict[str, str]:
    """Return the names of the user's hooks, by what has them: modules and parameters."""
    found: dict[str, str] = {}
    for name, each in (*module.named_modules(), *module.named_parameters()):
        tables = _tables_of(each, (*_TABLES, _OF_PARAMETERS))
        names = [_name_of(hook) for table in tables for hook in table.values() if _is_users(hook)]
        if names:
            found[name or "the module"] = ", ".join(names)
    return found


def _tables_of(owner: Any, names: Sequence[str]) -> Iterator[Table]:
    return (table for name in names if (table := getattr(owner, name, None)) is not None)


def _is_users(hook: Any) -> bool:
    return callable(hook) and not _name_of(hook).startswith(_NOT_USERS)


def _name_of(hook: Any) -> str:
    while isinstance(hook, functools.partial):
        hook = hook.func
    hook = getattr(hook, "__func__", hook)
    named = hook if hasattr(hook, "__qualname__") else type(hook)
    return f"{named.__module__}.{named.__qualname__}"
