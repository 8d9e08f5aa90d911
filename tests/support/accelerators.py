"""Accelerators that bring a device of their own."""

import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch.accelerators import Accelerator, CPUAccelerator, CUDAAccelerator
from torch.distributed import ProcessGroup

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


@overriding()
class OneGpuNccl(OneGpu):
    """All ranks share a GPU, and NCCL takes each of them for a machine of its own."""

    def recovery_device(self, root_device: torch.device) -> Device:
        for switched_off in ("NCCL_IB_DISABLE", "NCCL_P2P_DISABLE", "NCCL_SHM_DISABLE"):
            os.environ[switched_off] = "1"
        os.environ["NCCL_SOCKET_IFNAME"] = "lo"
        os.environ["NCCL_HOSTID"] = f"rank{os.environ['LOCAL_RANK']}"
        return Cuda(0)


@overriding(new=("opened",))
class DiesConnecting(Cuda):
    """Rank 2 is killed once while communicators connect, when a recovery connects them again."""

    opened = 0

    def connect(self, group: ProcessGroup) -> Callable[[], bool]:
        self.opened += 1
        marker = Path(os.environ["TORN_CONNECTION"])
        if os.environ["LOCAL_RANK"] == "2" and self.opened > int(marker.read_text()) > 0:
            marker.write_text("0")
            os.kill(os.getpid(), signal.SIGKILL)
        return super().connect(group)


@overriding(new=("recovery_device",))
class OneGpuThatDiesConnecting(OneGpuNccl):
    """As its base, but one rank dies while its communicators connect."""

    def recovery_device(self, root_device: torch.device) -> Device:
        super().recovery_device(root_device)
        return DiesConnecting(0)


def accelerator(name: str = "cpu") -> str | Accelerator:
    """What ``Trainer(accelerator=...)`` is given for a name; for the CPU, what ``$TESTS_ACCELERATOR`` names instead.

    So many tests that ask for nothing of a CPU can also run on a GPU: `benchmarks/first_cuda.py` has them do so.
    """
    if name == "cpu":
        name = os.environ.get("TESTS_ACCELERATOR", name)
    own: dict[str, type[Accelerator]] = {
        "apart": ApartAccelerator,
        "one gpu": OneGpu,
        "one gpu, nccl": OneGpuNccl,
        "one gpu, torn connection": OneGpuThatDiesConnecting,
        "simulated npu": SimulatedAccelerator,
    }
    return own[name]() if name in own else name
