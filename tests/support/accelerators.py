"""Accelerators that bring a device of their own."""

import torch
from lightning.pytorch.accelerators import Accelerator, CPUAccelerator

from lightning_replica.devices.cpu import Cpu
from lightning_replica.devices.interface import Device


class Apart(Cpu):
    """A CPU whose tensors count as those of a device: not to be mapped by others, nor waited for, nor sent directly."""

    is_host = False


class ApartAccelerator(CPUAccelerator):
    """Trains on the CPU by the paths of a device."""

    def recovery_device(self, root_device: torch.device) -> Device:
        return Apart()


def accelerator(name: str) -> str | Accelerator:
    """What ``Trainer(accelerator=...)`` is given for a name."""
    own: dict[str, type[Accelerator]] = {"apart": ApartAccelerator}
    return own[name]() if name in own else name
