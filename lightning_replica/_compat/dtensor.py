"""Tensors that torch's own tensor parallelism divides among ranks (DTensor), and the part of them that a rank has."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any

from torch import Tensor, nn

if TYPE_CHECKING:
    from torch.distributed.tensor import DTensor
    from typing_extensions import TypeIs

_MODULE = "torch.distributed.tensor"


def is_divided(tensor: Any) -> TypeIs[DTensor]:
    """Return whether ``tensor`` is a DTensor. Its module is not imported for that, which takes half a second."""
    module = sys.modules.get(_MODULE)
    return module is not None and isinstance(tensor, module.DTensor)


def local_of(tensor: Tensor) -> Tensor:
    """Return the part of a tensor that this rank has, in the same memory; a plain tensor is its own part."""
    return tensor._local_tensor if is_divided(tensor) else tensor


def set_local(parameter: Tensor, values: Tensor) -> None:
    """Make ``parameter`` hold ``values`` from now on: the part of it that this rank has."""
    if is_divided(parameter):
        parameter._local_tensor = values
    else:
        parameter.data = values


def like(tensor: Tensor, values: Tensor) -> Tensor:
    """Return ``values``, in the same memory, as this rank's part of a tensor that is divided as ``tensor`` is."""
    if not is_divided(tensor):
        return values
    made: Tensor = type(tensor).from_local(
        values, tensor.device_mesh, tensor.placements, run_check=False, shape=tensor.shape, stride=tensor.stride()
    )
    return made


def local_gradient(parameter: nn.Parameter) -> Tensor | None:
    """Return this rank's part of a parameter's gradient.

    Collective over the ranks that share the parameter if the gradient is not divided as the parameter is, but has still
    to be added up over them.
    """
    gradient = parameter.grad
    if not is_divided(gradient):
        return gradient
    if is_divided(parameter) and gradient.placements != parameter.placements:
        gradient = gradient.redistribute(placements=parameter.placements)
    return local_of(gradient)


def is_shared(tensor: Tensor) -> bool:
    """Return whether all tensor ranks have the same part of a tensor: all of it."""
    return not is_divided(tensor) or all(each.is_replicate() for each in tensor.placements)


def ranks_of(tensor: Tensor) -> tuple[int, ...]:
    """Return the ranks among which a tensor is divided; none for a plain tensor."""
    return tuple(tensor.device_mesh.mesh.flatten().tolist()) if is_divided(tensor) else ()


def names_of_mesh(tensor: Tensor) -> tuple[str, ...]:
    """Return the names of the dimensions of the mesh over which a tensor is divided; none if they have no names."""
    return tuple(tensor.device_mesh.mesh_dim_names or ()) if is_divided(tensor) else ()
