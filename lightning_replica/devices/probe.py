"""Which devices and backends a machine has, for people to read."""

import torch
import torch.distributed as dist

from lightning_replica.devices import gloo, npu_package
from lightning_replica.errors import ConfigurationError

NEEDED = gloo.NAME  # carries the host's tensors


def accelerators() -> dict[str, str]:
    """For every kind that is known, what was found; empty if nothing was."""
    cuda = [torch.cuda.get_device_name(index) for index in range(torch.cuda.device_count())]
    return {"cuda": ", ".join(cuda), "npu": ", ".join(_npus())}


def _npus() -> list[str]:
    try:
        torch_npu = npu_package.load_with_devices()
    except ConfigurationError:
        return []
    return [torch_npu.npu.get_device_name(index) for index in range(torch_npu.npu.device_count())]


def backends() -> dict[str, bool]:
    """For every backend of torch.distributed that is known, whether it is there."""
    return {name: dist.is_backend_available(name) for name in (NEEDED, "nccl", "hccl")}
