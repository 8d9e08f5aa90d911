"""What `torch.nn.utils.prune` does to a module, seen, undone and done again."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn.utils import prune


@dataclass(frozen=True)
class Pruned:
    """A tensor that is pruned.

    Attributes:
        module: Whose tensor it is.
        name: What it is called there; its parameter is called ``<name>_orig``, its mask ``<name>_mask``.
        method: The hook that applies the mask in every forward pass.
        mask: The mask.
        data: The memory of its parameter, which `prune.remove` leaves as it is and replaces.
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
        """What tells it from all others, also when it is pruned again."""
        return id(self.module), self.name

    def undo(self) -> None:
        """Take the pruning away; the parameter comes last among its module's."""
        module, name = self.module, self.name
        for number, hook in list(module._forward_pre_hooks.items()):
            if hook is self.method:
                del module._forward_pre_hooks[number]
        vars(module).pop(name, None)
        module._parameters[name] = module._parameters.pop(f"{name}_orig")
        del module._buffers[f"{name}_mask"]

    def redo(self) -> None:
        """Prune with the same method and mask, after `prune.remove`."""
        module, name = self.module, self.name
        module._parameters[f"{name}_orig"] = module._parameters.pop(name)
        self.regain()
        module.register_buffer(f"{name}_mask", self.mask)
        setattr(module, name, self.method.apply_mask(module))
        module.register_forward_pre_hook(self.method)

    def regain(self) -> None:
        """Give the parameter its memory again; the shards give it only to those that are trained."""
        parameter = self.module._parameters[f"{self.name}_orig"]
        if parameter is not None and parameter.data_ptr() != self.data.data_ptr():
            parameter.data = self.data


def prune_nothing(module: nn.Module, name: str) -> None:
    """Prune a parameter with a mask of ones, to be filled."""
    prune.custom_from_mask(module, name, torch.ones_like(getattr(module, name)))


def arrange(modules: Iterable[nn.Module], parameters: Sequence[nn.Parameter]) -> None:
    """Give ``modules`` their parameters in the order of ``parameters``."""
    places = {id(parameter): place for place, parameter in enumerate(parameters)}
    for module in modules:
        # One that is shared counts where it is first.
        own = {name: places.pop(id(each)) for name, each in module._parameters.items() if id(each) in places}
        ordered = sorted(own, key=own.__getitem__)
        if ordered != list(own):
            for name in ordered:
                module._parameters[name] = module._parameters.pop(name)
