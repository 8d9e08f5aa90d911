"""Names of torch that are private, or were renamed."""

from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer
from torch.utils.data import DataLoader


def data_version(tensor: Tensor) -> int:
    """Changes whenever the tensor is written to."""
    return tensor._version


def mark_stepped(optimizer: Optimizer) -> None:
    """Keeps schedulers from warning that they step before the optimizer: on a replacement it steps elsewhere."""
    optimizer._opt_called = True  # type: ignore[attr-defined]


def as_bytes(tensor: Tensor) -> memoryview:
    """The memory of a contiguous CPU tensor."""
    return memoryview(tensor.view(torch.uint8).numpy())  # type: ignore[arg-type]


def update_scale(scaler: torch.amp.GradScaler, found_inf: bool) -> None:
    """What ``GradScaler.update`` does after a step, with the finding given instead of collected from optimizers."""
    device = scaler._device
    if scaler._scale is None:
        scaler._lazy_init_scale_growth_tracker(torch.device(device))
    scale, growth = scaler._check_scale_growth_tracker("update")
    found = torch.full((), float(found_inf), dtype=torch.float32, device=scale.device)
    factors = (scaler.get_growth_factor(), scaler.get_backoff_factor(), scaler.get_growth_interval())
    torch._amp_update_scale_(scale, growth, found, *factors)


def forget_workers(loader: DataLoader[Any]) -> None:
    """Makes a loader with persistent workers start new ones."""
    loader._iterator = None
