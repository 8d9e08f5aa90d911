"""Finds, undoes and redoes what `torch.nn.utils.prune` does to a module."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn.utils import prune

from lightning_replica._compat.versions import need, private_names_of

with private_names_of("torch"):
    need(nn.Module(), "_forward_pre_hooks", "_buffers", "_parameters")
    need(prune.BasePruningMethod, "apply_mask")
    need(prune, "custom_from_mask")


@dataclass(frozen=True)
class Pruned:
    """A tensor that is pruned.

    Attributes:
        module: The module that has the tensor.
        name: The tensor's name in the module; its parameter is called ``<name>_orig``, its mask ``<name>_mask``.
        method: The hook that applies the mask in every forward pass.
        mask: The mask.
        data: The memory of the parameter. `prune.remove` gives the parameter other memory, and leaves this unchanged.
    """

    module: nn.Module
    name: str
    method: prune.BasePruningMethod
    mask: Tensor
    data: Tensor

    @classmethod
    def among(cls, modules: Iterable[nn.Module]) -> "list[Pruned]":
        """Return the tensors of ``modules`` that are pruned."""
        found = []
        for module in modules:
            if not module._forward_pre_hooks:
                continue
            for method in module._forward_pre_hooks.values():
                if isinstance(method, prune.BasePruningMethod):
                    name = method._tensor_name
                    mask, parameter = module._buffers[f"{name}_mask"], module._parameters[f"{name}_orig"]
                    found.append(cls(module, name, method, mask, parameter.data))  # type: ignore[arg-type, union-attr]
        return found

    @property
    def key(self) -> tuple[int, str]:
        """A key that identifies the tensor, and stays the same when the tensor is pruned again."""
        return id(self.module), self.name

    def undo(self) -> None:
        """Undo the pruning. Afterwards, the parameter is the last one of its module."""
        module, name = self.module, self.name
        for number, hook in list(module._forward_pre_hooks.items()):
            if hook is self.method:
                del module._forward_pre_hooks[number]
        vars(module).pop(name, None)
        module._parameters[name] = module._parameters.pop(f"{name}_orig")
        del module._buffers[f"{name}_mask"]

    def redo(self) -> None:
        """Prune again with the same method and mask, after `prune.remove`."""
        module, name = self.module, self.name
        module._parameters[f"{name}_orig"] = module._parameters.pop(name)
        self.regain()
        module.register_buffer(f"{name}_mask", self.mask)
        setattr(module, name, self.method.apply_mask(module))
        module.register_forward_pre_hook(self.method)

    def regain(self) -> None:
        """Give the parameter its memory back; the shards do that only for parameters that are trained."""
        parameter = self.module._parameters[f"{self.name}_orig"]
        if parameter is not None and parameter.data_ptr() != self.data.data_ptr():
            parameter.data = self.data


def prune_nothing(module: nn.Module, name: str) -> None:
    """Prune a parameter with a mask of ones, which the caller fills later."""
    prune.custom_from_mask(module, name, torch.ones_like(getattr(module, name)))


def arrange(modules: Iterable[nn.Module], parameters: Sequence[nn.Parameter]) -> None:
    """Give ``modules`` their parameters in the order of ``parameters``."""
    places = {id(parameter): place for place, parameter in enumerate(parameters)}
    for module in modules:
        # A shared parameter counts for the first module that has it.
        own = {name: places.pop(id(each)) for name, each in module._parameters.items() if id(each) in places}
        ordered = sorted(own, key=own.__getitem__)
        if ordered != list(own):
            for name in ordered:
                module._parameters[name] = module._parameters.pop(name)
