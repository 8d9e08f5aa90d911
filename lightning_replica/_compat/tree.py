"""One walk over a module and all that it consists of, for everyone who wants to know in a snapshot."""

from dataclasses import dataclass

from torch import Tensor, nn


@dataclass(frozen=True)
class Tree:
    """What a module consists of just now; it may have other submodules, parameters and buffers a moment later.

    Attributes:
        modules: In the order of ``modules()``.
        parameters: In the order of ``parameters()``.
        buffers: By name, in the order of ``named_buffers()``.
    """

    modules: list[nn.Module]
    parameters: list[nn.Parameter]
    buffers: dict[str, Tensor]

    @classmethod
    def of(cls, module: nn.Module) -> "Tree":
        """Walks once; torch's own iterators walk anew for each of these, and take several times as long for it."""
        modules: dict[int, nn.Module] = {}  # by identity, as all of these: each is listed once
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
