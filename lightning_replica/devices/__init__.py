"""What differs from device to device, behind one interface. May import `_compat`."""

import logging
import os
from collections.abc import Callable
from functools import cache
from typing import Any

import torch

from lightning_replica.devices import npu_settings
from lightning_replica.devices.cpu import Cpu
from lightning_replica.devices.cuda import Cuda
from lightning_replica.devices.interface import Device
from lightning_replica.devices.npu import Npu
from lightning_replica.errors import ConfigurationError

log = logging.getLogger(__name__)


def _npu(index: int) -> Device:
    _prepare_npu()
    return Npu(index)


@cache
def _prepare_npu() -> None:
    """Set the variables once per process; processes that it starts inherit them."""
    npu_settings.complete(os.environ)
    for harm in npu_settings.harms(os.environ):
        log.warning("%s: %s", harm.given, harm.advice)


_DEVICES: dict[str, Callable[[int], Device]] = {Cpu.kind: lambda _: Cpu(), Cuda.kind: Cuda, Npu.kind: _npu}


def device_for(root_device: torch.device, accelerator: Any) -> Device:
    """Return the device that a rank trains on.

    Args:
        root_device: Where Lightning puts the rank's tensors.
        accelerator: Lightning's accelerator. If it has a method ``recovery_device(root_device)``, that method returns
            the device. In this way, a third party's accelerator can bring a device that this package does not know.

    Raises:
        ConfigurationError: If the package does not know the device, and the accelerator brings none.
    """
    own = getattr(accelerator, "recovery_device", None)
    if own is not None:
        device: Device = own(root_device)
        return device
    if root_device.type in _DEVICES:
        return _DEVICES[root_device.type](root_device.index or 0)
    raise ConfigurationError(
        f"accelerator={type(accelerator).__name__} trains on {root_device.type!r}; `replica_zero` runs on"
        f" {', '.join(_DEVICES)}. Set `Trainer(accelerator='cpu')`, or give the accelerator a method"
        " `recovery_device(root_device)` that returns a `lightning_replica.devices.interface.Device`."
    )
