"""A part of a parameter, as the optimizer and checkpoints see it."""

from collections.abc import Mapping
from copy import deepcopy
from typing import Any

from torch import Tensor, nn
from torch.optim import Optimizer

from lightning_replica._compat.dtensor import local_of
from lightning_replica.sharding.layout import ParameterPiece
from lightning_replica.sharding.values import Values

# State entries that are one number for every parameter. For a parameter of shape (), only the name shows this.
_NUMBERS = ("step", "mu", "mu_product", "eta")


class Piece:
    """A part of a parameter, as the optimizer sees it.

    Args:
        optimizer: The optimizer.
        buffers: The buffers that hold it.
        where: Its ranges in the buffers and in the parameter.

    Attributes:
        buffers: The buffers that hold it.
        where: Its ranges in the buffers and in the parameter.
        parameter: The parameter in the optimizer's param group during an update: a view into ``buffers.main``.
    """

    def __init__(self, optimizer: Optimizer, buffers: Values, where: ParameterPiece) -> None:
        self._optimizer, self.buffers, self.where = optimizer, buffers, where
        self.parameter = nn.Parameter(buffers.piece_of(where, buffers.main))

    @property
    def order(self) -> int:
        """Position of the parameter among all parameters of the module."""
        return self.buffers.order[self.where.parameter]

    @property
    def rank(self) -> int:
        """The rank whose piece it is."""
        return self.where.rank

    @property
    def start(self) -> int:
        """Its first element in the flattened parameter."""
        return self.where.param.start

    @property
    def value(self) -> Tensor:
        """Its values in ``buffers.params``, of shape (numel,)."""
        return self.buffers.params[self.where.world.start : self.where.world.stop]

    @property
    def main(self) -> Tensor | None:
        """Its values in ``buffers.main``, of shape (numel,); None where these have the dtype of ``buffers.params``."""
        if self.buffers.main.dtype == self.buffers.params.dtype:
            return None
        return self.buffers.main[self.where.local.start : self.where.local.stop]

    @property
    def state(self) -> Mapping[str, Any] | None:
        """Its optimizer state; None if there is none yet."""
        found: Mapping[str, Any] | None = self._optimizer.state.get(self.parameter)
        return found

    def is_like(self, key: str, value: Any) -> bool:
        """Return whether an entry of an optimizer's state has one element for each element of the piece."""
        return is_like(key, value, self.parameter)

    def split(self, whole: Tensor) -> Tensor:
        """Return the part of ``whole``, a tensor in the shape of the parameter, that belongs to the piece."""
        return self.buffers.split(self.where, whole)

    @property
    def whole(self) -> nn.Parameter:
        """The module's parameter that this is a part of."""
        return self.buffers.parameters[self.where.parameter]

    def cut(self, key: str, value: Any) -> Any:
        """Return the piece's own part of an entry in the state of the whole parameter.

        The part has the piece's dtype, as after ``Optimizer.load_state_dict``. An entry that is not cut is copied: a
        step counter that two pieces share would count twice.
        """
        value = local_of(value) if isinstance(value, Tensor) else value
        if not is_like(key, value, local_of(self.whole)):
            return deepcopy(value)
        part = self.buffers.split(self.where, value)
        return part.to(self.parameter.dtype) if part.is_floating_point() else part

    @property
    def used(self) -> bool:
        """Whether any rank has a gradient for the parameter."""
        return self.buffers.used[self.where.parameter]


def is_like(key: str, value: Any, parameter: Tensor) -> bool:
    """Return whether an entry of an optimizer's state has one element for every element of the parameter."""
    if not isinstance(value, Tensor) or value.shape != parameter.shape:
        return False
    return value.ndim > 0 or key not in _NUMBERS
