"""The structure of a model, which may change during training; ranks that go back and replacements follow the change.

`torch.nn.utils.prune` turns a parameter ``weight`` into a parameter ``weight_orig``, a buffer ``weight_mask`` and a
hook. The parameter is the same object, but becomes the last one of its module. `torchmetrics.MetricTracker` adds a
submodule with each `increment`. User code registers hooks. A rank that goes back to before such a change has to undo
it. A rank that goes back to before `prune.remove` has to prune again. The script of a replacement has built the model
as it was before training, so a replacement has to make all changes. All this happens before anything is restored by
name or by order. Masks are restored with all other buffers.
"""

from collections.abc import Collection
from dataclasses import dataclass

from torch import nn
from torchmetrics import MetricTracker

from lightning_replica._compat.pruning import Pruned, arrange, prune_nothing
from lightning_replica._compat.tree import Tree
from lightning_replica.errors import RecoveryError
from lightning_replica.state.hooks import Hooks


@dataclass(frozen=True)
class Structure:
    """The parts of a model that may change, as they were at one point.

    Attributes:
        modules: The model and all submodules, in the order of ``modules()``.
        children: The children of each of these modules, by name.
        parameters: All parameters, in the order of ``parameters()``.
        pruned: The tensors that are pruned.
        hooks: The hooks of the modules.
    """

    modules: list[nn.Module]
    children: list[dict[str, nn.Module | None]]
    parameters: list[nn.Parameter]
    pruned: list[Pruned]
    hooks: Hooks

    @classmethod
    def of(cls, tree: Tree, former: "Structure | None" = None) -> "Structure":
        """Return the structure of a tree.

        This is called twice a step, so it takes the children from ``former`` if the modules are the same.
        """
        if former is not None and former.modules == tree.modules:
            children = former.children
        else:
            children = [dict(module._modules) for module in tree.modules]
        hooked = [tree.modules[number] for number in tree.hooked()]
        hooks = Hooks.of(tree, None if former is None else former.hooks)
        return cls(tree.modules, children, tree.parameters, Pruned.among(hooked), hooks)

    def put_back(self, module: nn.Module) -> None:
        """Give this structure back to ``module``, if it has another one by now."""
        if list(module.modules()) != self.modules:
            for parent, children in zip(self.modules, self.children, strict=True):
                parent._modules.clear()
                parent._modules.update(children)
        modules = self.modules
        before = {tensor.key: tensor for tensor in self.pruned}
        now = {tensor.key: tensor for tensor in Pruned.among(modules)}
        for key, tensor in now.items():
            if key not in before:
                tensor.undo()
        for key, tensor in before.items():
            if key not in now:
                tensor.redo()
            else:
                tensor.regain()
        arrange(modules, self.parameters)
        self.hooks.put_back(Tree.of(module))


@dataclass(frozen=True)
class Outline:
    """The names of all submodules and parameters in their order, which a replacement has to `follow`."""

    modules: list[str]
    parameters: list[str]

    @classmethod
    def of(cls, module: nn.Module) -> "Outline":
        """Return the outline of a module."""
        return cls(names_of_modules(module), [name for name, _ in module.named_parameters()])


def names_of_modules(module: nn.Module) -> list[str]:
    """Return the names of all submodules, in their order."""
    return [name for name, _ in module.named_modules()]


def follow(module: nn.Module, outline: Outline, buffers: Collection[str]) -> None:
    """Give a replacement's model the structure that the model has on the ranks that trained it.

    Args:
        module: The model as the script has built it.
        outline: The outline of the model on the ranks that trained it.
        buffers: The names of the model's buffers on those ranks.

    Raises:
        RecoveryError: If the structure has changed in a way that cannot be followed.
    """
    grow(module, outline.modules)
    if names_of_modules(module) != outline.modules:
        raise _changed("submodules", outline.modules, names_of_modules(module))
    own = Outline.of(module).parameters
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
    parameters = dict(module.named_parameters())
    if parameters.keys() != set(outline.parameters):
        raise _changed("parameters", outline.parameters, parameters)
    arrange(module.modules(), [parameters[name] for name in outline.parameters])
    if Outline.of(module) != outline:
        raise _changed("parameters", outline.parameters, Outline.of(module).parameters)


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
        f" {difference}. Create all submodules and parameters in the model's constructor or in `configure_model`. Of"
        " later changes, only those by `torch.nn.utils.prune` and torchmetrics' `MetricTracker` are followed."
    )


def _some(names: Collection[str]) -> str:
    shown = ", ".join(repr(name) for name in list(names)[:5])
    return f"{shown} and {len(names) - 5} more" if len(names) > 5 else shown or "none"
