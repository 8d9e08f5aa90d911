"""The user's own optimizer, at work on the pieces of a shard."""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from lightning_replica.errors import ConfigurationError
from lightning_replica.sharding.buffers import Buffers
from lightning_replica.sharding.layout import ParameterPiece

ELEMENT_WISE: tuple[type[Optimizer], ...] = (
    torch.optim.ASGD,
    torch.optim.Adadelta,
    torch.optim.Adagrad,
    torch.optim.Adam,
    torch.optim.AdamW,
    torch.optim.Adamax,
    torch.optim.NAdam,
    torch.optim.RAdam,
    torch.optim.RMSprop,
    torch.optim.Rprop,
    torch.optim.SGD,
)


def trained_parameters(optimizer: Optimizer) -> list[nn.Parameter]:
    """The parameters that ``optimizer`` trains, in order of its groups; frozen ones are left out."""
    return [p for group in optimizer.param_groups for p in group["params"] if p.requires_grad]


def check_element_wise(optimizer: Optimizer) -> None:
    """Refuses an optimizer whose update of an element depends on other elements.

    Raises:
        ConfigurationError: If the optimizer is not known to be element-wise, or has already made a step.
    """
    name = type(optimizer).__name__
    if not isinstance(optimizer, ELEMENT_WISE):
        known = ", ".join(cls.__name__ for cls in ELEMENT_WISE)
        raise ConfigurationError(
            f"`replica_zero` cuts parameters into pieces, and {name} is not known to update every element on its own:"
            f" on pieces it would train something else. Use one of {known} (or a subclass), or another strategy."
        )
    if optimizer.state:
        raise ConfigurationError(
            f"{name} already holds state for {len(optimizer.state)} parameters before training begins."
            " Return a new optimizer from `configure_optimizers`."
        )


class ShardedOptimizer:
    """Re-points an optimizer's param groups from whole parameters to the pieces of this rank's shard.

    The object stays the user's: schedulers, hooks and ``param_groups[i]["lr"]`` work as before. A group that owns
    nothing in this shard stays, empty. Following Megatron-core's distributed optimizer (seeds 002 and 004), but
    with the user's optimizer instead of a wrapper.
    """

    def __init__(self, optimizer: Optimizer, buffers: Buffers, parameters: Sequence[nn.Parameter]) -> None:
        self.optimizer = optimizer
        self._buffers = buffers
        self.pieces = buffers.layout.pieces(buffers.shard)
        index_of = {id(parameter): index for index, parameter in enumerate(parameters)}
        self.parameters = [self._parameter(piece) for piece in self.pieces]
        own: dict[int, list[nn.Parameter]] = {}
        for piece, parameter in zip(self.pieces, self.parameters, strict=True):
            own.setdefault(piece.parameter, []).append(parameter)
        for group in optimizer.param_groups:
            trained = [index_of[id(p)] for p in group["params"] if p.requires_grad]
            group["params"] = [piece for index in trained for piece in own.get(index, [])]
        # Lightning's closure calls this where gradients are the whole parameters', not the pieces'.
        optimizer.zero_grad = self._zero_grad  # type: ignore[method-assign]

    def update(self, clip_coefficient: float | None) -> None:
        """Makes one optimizer step on the shard; the gradient is scaled first if asked for."""
        if clip_coefficient is not None:
            self._buffers.main_grads.mul_(clip_coefficient)
        for piece, parameter in zip(self.pieces, self.parameters, strict=True):
            parameter.grad = self._buffers.main_grads[piece.local.start : piece.local.stop]
        self.optimizer.step()

    def state(self) -> dict[str, Any]:
        """Everything the update depends on besides the shard's values, as tensors by name and plain scalars.

        Returns:
            ``{"tensors": {"<piece>/<key>": tensor}, "scalars": {...}}`` with every tensor as the optimizer holds
            it: writing into one writes into the optimizer.
        """
        tensors: dict[str, Tensor] = {}
        scalars: dict[str, Any] = {}
        for number, parameter in enumerate(self.parameters):
            for key, value in self.optimizer.state.get(parameter, {}).items():
                (tensors if isinstance(value, Tensor) else scalars)[f"{number}/{key}"] = value
        return {"tensors": tensors, "scalars": scalars}

    def prepare_state(
        self, shapes: Mapping[str, tuple[torch.dtype, tuple[int, ...]]], scalars: Mapping[str, Any]
    ) -> None:
        """Makes the optimizer's state as a peer describes it, tensors uninitialised, ready to be received."""
        self.optimizer.state.clear()
        for name, (dtype, shape) in shapes.items():
            parameter, key = self._owner(name)
            self.optimizer.state[parameter][key] = torch.empty(shape, dtype=dtype, device=parameter.device)
        for name, value in scalars.items():
            parameter, key = self._owner(name)
            self.optimizer.state[parameter][key] = value

    def _owner(self, name: str) -> tuple[nn.Parameter, str]:
        number, key = name.split("/", 1)
        return self.parameters[int(number)], key

    def _parameter(self, piece: ParameterPiece) -> nn.Parameter:
        return nn.Parameter(self._buffers.main[piece.local.start : piece.local.stop])

    def _zero_grad(self, set_to_none: bool = True) -> None:
        """Zeroes the gradients of the whole parameters; they are views and never become None."""
        self._buffers.zero_gradients()
