"""The structure of a model that is pruned while it trains: ranks that go back and ranks that are new follow it.

`torch.nn.utils.prune` turns a parameter ``weight`` into a parameter ``weight_orig``, a buffer ``weight_mask`` and a
hook; the parameter is the same, but comes last among its module's. A rank that goes back over this has to undo it, one
that goes back over `prune.remove` has to do it again, and a replacement, whose script has built the model as it was
before training, has to catch up. All this comes before anything is put back by name or by order. Masks are put back
with all other buffers.
"""

from collections.abc import Collection, Sequence
from dataclasses import dataclass

from torch import nn

from lightning_replica._compat.pruning import Pruned, arrange, prune_nothing
from lightning_replica._compat.tree import Tree
from lightning_replica.errors import RecoveryError


@dataclass(frozen=True)
class Structure:
    """What of a model pruning changes, at one point.

    Attributes:
        parameters: In the order of ``parameters()``.
        pruned: Which tensors are pruned.
    """

    parameters: list[nn.Parameter]
    pruned: list[Pruned]

    @classmethod
    def of(cls, tree: Tree) -> "Structure":
        """Return that of a tree. It is asked for twice a step, and costs nothing where nothing is pruned."""
        return cls(tree.parameters, Pruned.among(tree.modules))

    def put_back(self, module: nn.Module) -> None:
        """Give the structure to ``module`` again, where it has another one by now."""
        modules = list(module.modules())
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


def names_of(module: nn.Module) -> list[str]:
    """Return the names of all parameters, in their order, which a replacement is to `follow`."""
    return [name for name, _ in module.named_parameters()]


def follow(module: nn.Module, names: Sequence[str], buffers: Collection[str]) -> None:
    """Give a replacement's model the structure that it has in the processes that have trained it.

    Args:
        module: As the script has built it.
        names: The parameters that it has there, in their order.
        buffers: The buffers that it has there.

    Raises:
        RecoveryError: If more than pruning has changed the parameters.
    """
    own = names_of(module)
    if own == list(names):
        return
    for tensor in Pruned.among(module.modules()):
        path = next(path for path, submodule in module.named_modules() if submodule is tensor.module)
        if _join(path, f"{tensor.name}_orig") not in names:
            tensor.undo()
    for name in own:
        if f"{name}_orig" in names and name not in names and f"{name}_mask" in buffers:
            path, _, tensor_name = name.rpartition(".")
            prune_nothing(module.get_submodule(path), tensor_name)
    parameters = dict(module.named_parameters())
    if parameters.keys() != set(names):
        raise _changed(set(names), set(parameters))
    arrange(module.modules(), [parameters[name] for name in names])
    if names_of(module) != list(names):
        raise RecoveryError(
            "The structure of the model has changed in training: its parameters come in another order than in a process"
            f" that runs the script again, {_some(names)} instead of {_some(names_of(module))}. Register submodules and"
            " parameters when the model is made, or in `configure_model`."
        )


def _join(path: str, name: str) -> str:
    return f"{path}.{name}" if path else name


def _changed(there: set[str], here: set[str]) -> RecoveryError:
    return RecoveryError(
        "The structure of the model has changed in training, so a lost rank cannot be replaced: the ranks that trained"
        f" have the parameters {_some(sorted(there - here))}, a process that runs the script again has"
        f" {_some(sorted(here - there))} instead. Make all parameters when the model is made, or in `configure_model`;"
        " of what changes in training, only `torch.nn.utils.prune` is followed."
    )


def _some(names: Sequence[str]) -> str:
    shown = ", ".join(repr(name) for name in names[:5])
    return f"{shown} and {len(names) - 5} more" if len(names) > 5 else shown or "none"
