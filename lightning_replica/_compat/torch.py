"""Names of torch that are private, or were renamed."""

import torch
from torch import Tensor
from torch.optim import Optimizer


def data_version(tensor: Tensor) -> int:
    """Changes whenever the tensor is written to."""
    return tensor._version


def mark_stepped(optimizer: Optimizer) -> None:
    """Keeps schedulers from warning that they step before the optimizer: on a replacement it steps elsewhere."""
    optimizer._opt_called = True  # type: ignore[attr-defined]


def as_bytes(tensor: Tensor) -> memoryview:
    """The memory of a contiguous CPU tensor."""
    return memoryview(tensor.view(torch.uint8).numpy())  # type: ignore[arg-type]
