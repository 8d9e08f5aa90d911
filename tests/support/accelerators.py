"""Accelerators that bring a device of their own."""

from typing import Any

import torch
from lightning.pytorch.accelerators import Accelerator, CPUAccelerator, CUDAAccelerator

from lightning_replica.devices.cpu import Cpu
from lightning_replica.devices.cuda import Cuda
from lightning_replica.devices.interface import Device
from tests.support.doubles import overriding
from tests.support.simulated_npu import SimulatedAccelerator


@overriding()
class Apart(Cpu):
    """A CPU whose tensors count as those of a device: not to be mapped by others, nor waited for, nor sent directly."""

    is_host, stops = False, False


@overriding(new=("recovery_device",))
class ApartAccelerator(CPUAccelerator):
    """Trains on the CPU by the paths of a device."""

    def recovery_device(self, root_device: torch.device) -> Device:
        return Apart()


@overriding(new=("recovery_device",))
class OneGpu(CUDAAccelerator):
    """All ranks share a GPU. NCCL refuses that, so everything goes over gloo."""

    @staticmethod
    def parse_devices(devices: Any) -> list[int]:
        return list(range(int(devices)))

    @staticmethod
    def get_parallel_devices(devices: list[int]) -> list[torch.device]:
        return [torch.device("cuda", 0) for _ in devices]

    def recovery_device(self, root_device: torch.device) -> Device:
        return Cuda(0, backend="gloo")


def accelerator(name: str) -> str | Accelerator:
    """What ``Trainer(accelerator=...)`` is given for a name."""
    own: dict[str, type[Accelerator]] = {
        "apart": ApartAccelerator,
        "one gpu": OneGpu,
        "simulated npu": SimulatedAccelerator,
    }
    return own[name]() if name in own else name
