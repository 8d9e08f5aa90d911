"""The structure of a model, which may change during training; ranks that go back and replacements follow the change.

User code sets an attribute to another submodule, sets a buffer to None or replaces it, registers hooks, and replaces a
frozen parameter. `torch.nn.utils.prune` turns a parameter ``weight`` into a parameter ``weight_orig``, a buffer
``weight_mask`` and a hook; the parameter is the same object, but becomes the last one of its module.
`torchmetrics.MetricTracker` adds a submodule with each `increment`.

A rank that goes back gets back what each module had registered: the same objects under the same names. The script of a
replacement has built the model as it was before training, so a replacement has to make all changes. All this happens
before anything is restored by name or by order. Contents are restored with all other parameters and buffers.
"""

import operator
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass
from itertools import chain
from typing import Any, Final, TypeAlias

import torch
from torch import Tensor, nn
from torchmetrics import MetricTracker

from lightning_replica._compat.pruning import Pruned, arrange, prune_nothing
from lightning_replica._compat.tree import Tree, registered
from lightning_replica.errors import RecoveryError
from lightning_replica.state.hooks import Hooks

Tables: TypeAlias = tuple[dict[str, Any], ...]
"""What one module has registered: its submodules, its parameters and its buffers, each by name."""

_NEW: Final = "new "
_KINDS: Final = ("submodules", "parameters", "buffers")


@dataclass(frozen=True)
class Structure:
    """The parts of a model that may change, as they were at one point.

    Attributes:
        tree: The parts of the model.
        tables: What each of its modules had registered.
        temporary: Of each module, the names of the buffers that are not saved.
        pruned: The tensors that are pruned.
        hooks: The hooks of modules and tensors.
    """

    tree: Tree
    tables: list[Tables]
    temporary: list[frozenset[str]]
    pruned: list[Pruned]
    hooks: Hooks

    @classmethod
    def of(cls, tree: Tree, former: "Structure | None" = None, tensors: Iterable[Tensor] = ()) -> "Structure":
        """Return the structure of a tree.

        This is called twice a step, so it takes the tables from ``former`` if the tree is the same.

        Args:
            tree: The tree.
            former: The structure that was taken last.
            tensors: Tensors beside those of the tree, which may have hooks.
        """
        if former is not None and former.tree is tree:
            tables, temporary = former.tables, former.temporary
        else:
            tables = [tuple(dict(table) for table in registered(module)) for module in tree.modules]
            temporary = [frozenset(module._non_persistent_buffers_set) for module in tree.modules]
        hooked = [tree.modules[number] for number in tree.hooked()]
        hooks = Hooks.of(tree, None if former is None else former.hooks, tensors)
        return cls(tree, tables, temporary, Pruned.among(hooked), hooks)

    def put_back(self, module: nn.Module, tensors: Iterable[Tensor] = ()) -> None:
        """Give this structure back to ``module``, if it has another one by now, and hooks to ``tensors``."""
        self._register(("submodules",))
        before = {tensor.key: tensor for tensor in self.pruned}
        now = {tensor.key: tensor for tensor in Pruned.among(self.tree.modules)}
        for key, tensor in now.items():
            if key not in before:
                tensor.undo()
        for key, tensor in before.items():
            if key not in now:
                tensor.redo()
            else:
                tensor.regain()
        self._register(_KINDS)
        _set_temporary(self.tree.modules, self.temporary)
        self.hooks.put_back(Tree.of(module), tensors)

    def _register(self, kinds: Collection[str]) -> None:
        for module, tables in zip(self.tree.modules, self.tables, strict=True):
            for kind, table, entries in zip(_KINDS, registered(module), tables, strict=True):
                if kind in kinds:
                    _fill(table, entries)


def _fill(table: dict[str, Any], entries: Mapping[str, Any]) -> None:
    if [*table] != [*entries] or not all(map(operator.is_, table.values(), entries.values())):
        table.clear()
        table.update(entries)


def _set_temporary(modules: Iterable[nn.Module], temporary: Iterable[Collection[str]]) -> None:
    for module, names in zip(modules, temporary, strict=True):
        if module._non_persistent_buffers_set != set(names):
            module._non_persistent_buffers_set = set(names)


class Original:
    """The parts of a model when its fit began, where every process that has run the script has the same.

    Args:
        module: The model.
    """

    def __init__(self, module: nn.Module) -> None:
        self.parts = dict(_paths_of(module))
        self._names: dict[int, str] = {}
        for name, part in self.parts.items():
            self._names.setdefault(id(part), name)

    def name_of(self, part: Any) -> str | None:
        """Return the first name that a part had; None for what has been made since."""
        return self._names.get(id(part))


def _paths_of(module: nn.Module) -> Iterator[tuple[str, Any]]:
    """Yield the names and the parts of a model. A part that is registered twice has two names."""
    yield "", module
    for path, each in module.named_modules():
        for kind, table in zip(_KINDS, registered(each), strict=True):
            yield from ((f"{kind} {_join(path, name)}", part) for name, part in table.items() if part is not None)


@dataclass(frozen=True)
class Outline:
    """What a replacement has to `follow`: plain data.

    Attributes:
        modules: The names of all submodules in their order.
        parameters: The names of all parameters in their order.
        classes: The names of the classes of the submodules.
        entries: For each submodule, and for what it has registered of each kind, the names, and to what each leads: the
            name of an original part, `_NEW` and a name for a part that was made since, None for None.
        temporary: For each submodule, the names of the buffers that are not saved.
    """

    modules: list[str]
    parameters: list[str]
    classes: list[str]
    entries: list[list[list[list[str | None]]]]
    temporary: list[list[str]]

    @classmethod
    def of(cls, module: nn.Module, original: Original) -> "Outline":
        """Return the outline of a module, whose parts were ``original`` when its fit began."""
        modules = dict(module.named_modules())
        now = Original(module)
        entries = [
            [[[name, _leads_to(part, original, now)] for name, part in table.items()] for table in registered(each)]
            for each in modules.values()
        ]
        return cls(
            [*modules],
            [name for name, _ in module.named_parameters()],
            [f"{type(each).__module__}.{type(each).__qualname__}" for each in modules.values()],
            entries,
            [sorted(each._non_persistent_buffers_set) for each in modules.values()],
        )


def _leads_to(part: Any, original: Original, now: Original) -> str | None:
    return None if part is None else original.name_of(part) or f"{_NEW}{now.name_of(part)}"


def form_of(structure: Structure, original: Original) -> list[Any]:
    """Return what an outline depends on beside the classes of submodules: it takes a fraction of the time."""
    new, found = dict[int, int](), list[Any]()
    for tables in structure.tables:
        for table in tables:
            found += table
            found += [
                None if part is None else original.name_of(part) or new.setdefault(id(part), len(new))
                for part in table.values()
            ]
            found.append(";")
    return [*found, structure.temporary]


def names_of_modules(module: nn.Module) -> list[str]:
    """Return the names of all submodules, in their order."""
    return [name for name, _ in module.named_modules()]


def differences(saved: Outline, own: Outline) -> dict[str, str]:
    """Return what is another part of the model than in a process that has written a checkpoint: why, by name."""
    found = dict[str, str]()
    tables_of = dict(zip(own.modules, own.entries, strict=True))
    classes = dict(zip(own.modules, own.classes, strict=True))
    for path, cls, tables in zip(saved.modules, saved.classes, saved.entries, strict=True):
        if path not in classes or any(_is_in(path, name) for name in found):
            continue
        if classes[path] != cls:
            found[path] = f"code had set it to a {cls}, and in this process it is a {classes[path]}"
        for was, own_table in zip(tables, tables_of[path], strict=True):
            known = {name: _path_of(leads_to) for name, leads_to in own_table}
            for name, leads_to in was:
                before, now = _path_of(leads_to), known.get(name)
                if before and now and before != now:
                    found[_join(path, str(name))] = f"code had set it to {before}, and in this process it is {now}"
    return found


def _path_of(leads_to: str | None) -> str:
    return "" if leads_to is None else leads_to.removeprefix(_NEW).partition(" ")[2]


def _is_in(path: str, name: str) -> bool:
    return path == name or path.startswith(f"{name}.")


def follow(module: nn.Module, outline: Outline, buffers: Mapping[str, Tensor], original: Original) -> None:
    """Give a replacement's model the structure that the model has on the ranks that trained it.

    Args:
        module: The model as the script has built it.
        outline: The outline of the model on the ranks that trained it.
        buffers: The model's buffers on those ranks, by name.
        original: The parts of the model as the script has built it.

    Raises:
        RecoveryError: If the structure has changed in a way that cannot be followed.
    """
    grow(module, outline.modules)
    parts = _Parts(outline, buffers, original, module)
    parts.register("submodules")
    names = names_of_modules(module)
    if names != outline.modules:
        raise _changed("submodules", outline.modules, names)
    classes = Outline.of(module, original).classes
    if classes != outline.classes:
        pairs = zip(names, outline.classes, classes, strict=True)
        trained, own = zip(*((f"{name} ({a})", f"{name} ({b})") for name, a, b in pairs if a != b), strict=True)
        raise _changed("submodules", trained, own)
    _prune_as(module, outline, buffers)
    parameters = dict(module.named_parameters(remove_duplicate=False))
    if not parameters.keys() >= set(outline.parameters):  # what gives parameters other names may register hooks, too
        raise _changed("parameters", outline.parameters, dict(module.named_parameters()))
    parts.register("parameters")
    parts.register("buffers")
    parameters = dict(module.named_parameters())
    if parameters.keys() != set(outline.parameters):
        raise _changed("parameters", outline.parameters, parameters)
    arrange(module.modules(), [parameters[name] for name in outline.parameters])
    found = Outline.of(module, original)
    if found.parameters != outline.parameters:
        raise _changed("parameters", outline.parameters, found.parameters)
    _set_temporary(module.modules(), outline.temporary)


class _Parts:
    """The parts of a replacement's model that stand for those of the ranks that trained it.

    Args:
        outline: The outline of the model on the ranks that trained it.
        buffers: Its buffers there, by name.
        original: The parts of the model as the script has built it.
        module: The model.
    """

    def __init__(self, outline: Outline, buffers: Mapping[str, Tensor], original: Original, module: nn.Module) -> None:
        self._outline, self._buffers, self._original, self._module = outline, buffers, original, module
        names = {str(leads_to) for tables in outline.entries for table in tables for _, leads_to in table}
        self._found: dict[str, Any] = {name: original.parts[name] for name in names if name in original.parts}
        self._used = set(map(id, self._found.values()))

    def register(self, kind: str) -> None:
        """Register the parts of one kind in each module as the outline says, as far as there are such parts here."""
        modules, number = dict(self._module.named_modules(remove_duplicate=False)), _KINDS.index(kind)
        for path, tables in zip(self._outline.modules, self._outline.entries, strict=True):
            if path not in modules:
                continue
            table, wanted = registered(modules[path])[number], dict[str, Any]()
            for name, leads_to in tables[number]:
                part = None if leads_to is None else self._part(leads_to, table.get(str(name)), _join(path, str(name)))
                if leads_to is None or part is not None:  # if there is none, the names will differ
                    wanted[str(name)] = part
            _fill(table, wanted)

    def _part(self, leads_to: str, present: Any, path: str) -> Any:
        """Return the part that a name leads to; for one that was made in training, what is in its place here."""
        if leads_to not in self._found:
            if id(present) in self._used and isinstance(present, nn.Parameter):
                present = nn.Parameter(torch.empty_like(present), present.requires_grad)
            elif (present is None or id(present) in self._used) and path in self._buffers:
                present = self._new_like(self._buffers[path])
            if present is not None:
                self._found[leads_to] = present
                self._used.add(id(present))
        return self._found.get(leads_to)

    def _new_like(self, buffer: Tensor) -> Tensor:
        """Return a tensor like a buffer of another rank, on the device of the model. Its content is restored later."""
        part = next(chain(self._module.parameters(), self._module.buffers()), torch.empty(0))
        return torch.empty(buffer.shape, dtype=buffer.dtype, device=part.device)


def _prune_as(module: nn.Module, outline: Outline, buffers: Collection[str]) -> None:
    """Prune what is pruned on the ranks that trained, and nothing else."""
    own = [name for name, _ in module.named_parameters()]
    if own == outline.parameters:
        return
    for tensor in Pruned.among(module.modules()):
        path = next(path for path, submodule in module.named_modules() if submodule is tensor.module)
        if _join(path, f"{tensor.name}_orig") not in outline.parameters:
            tensor.undo()
    for name in own:
        if f"{name}_orig" in outline.parameters and name not in outline.parameters and f"{name}_mask" in buffers:
            path, _, tensor_name = name.rpartition(".")
            prune_nothing(module.get_submodule(path), tensor_name)


def grow(module: nn.Module, names: Collection[str]) -> None:
    """Increment each metric tracker until it has all the submodules that ``names`` lists for it."""
    for path, tracker in list(module.named_modules()):
        if isinstance(tracker, MetricTracker):
            while _join(path, str(len(tracker))) in names:
                tracker.increment()


def _join(path: str, name: str) -> str:
    return f"{path}.{name}" if path else name


def _changed(what: str, expected: Collection[str], found: Collection[str]) -> RecoveryError:
    more, fewer = ([name for name in a if name not in b] for a, b in ((expected, found), (found, expected)))
    again = "a process that runs the script again"
    if more or fewer:
        difference = f"have the {what} {_some(more)}, but {again} has {_some(fewer)} instead"
    else:
        difference = f"have the {what} in the order {_some(expected)}, but {again} has {_some(found)}"
    return RecoveryError(
        "The structure of the model has changed in training, so a lost rank cannot be replaced: the ranks that trained"
        f" {difference}. Create all submodules and parameters in the model's constructor or in `configure_model`. They"
        " may be registered elsewhere later; new ones are followed only if `torch.nn.utils.prune` or torchmetrics'"
        " `MetricTracker` has made them."
    )


def _some(names: Collection[str]) -> str:
    shown = ", ".join(repr(name) for name in list(names)[:5])
    return f"{shown} and {len(names) - 5} more" if len(names) > 5 else shown or "none"
