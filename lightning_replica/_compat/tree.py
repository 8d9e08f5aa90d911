"""One walk over a module and all its parts, shared by all parts of a snapshot that need them."""

from dataclasses import dataclass

from torch import Tensor, nn


@dataclass(frozen=True)
class Tree:
    """The parts of a module at one moment; user code may change submodules, parameters and buffers later.

    Attributes:
        modules: The module and its submodules, in the order of ``modules()``.
        parameters: The parameters, in the order of ``parameters()``.
        buffers: The buffers by name, in the order of ``named_buffers()``.
    """

    modules: list[nn.Module]
    parameters: list[nn.Parameter]
    buffers: dict[str, Tensor]

    @classmethod
    def of(cls, module: nn.Module) -> "Tree":
        """Walk over ``module`` once; torch's own iterators walk once for each kind, and take several times as long."""
        modules: dict[int, nn.Module] = {}  # by identity, like parameters and buffers: each is listed once
        parameters: dict[int, nn.Parameter] = {}
        buffers: dict[int, tuple[str, Tensor]] = {}
        ahead = [("", module)]
        while ahead:
            prefix, here = ahead.pop()
            if id(here) in modules:
                continue
            modules[id(here)] = here
            for parameter in here._parameters.values():
                if parameter is not None:
                    parameters[id(parameter)] = parameter
            for name, buffer in here._buffers.items():
                if buffer is not None:
                    buffers.setdefault(id(buffer), (prefix + name, buffer))
            children = [(f"{prefix}{name}.", child) for name, child in here._modules.items() if child is not None]
            ahead += children[::-1]
        return cls(list(modules.values()), list(parameters.values()), dict(buffers.values()))
