"""Lists the devices and backends of a machine, for people to read."""

import torch
import torch.distributed as dist

from lightning_replica.devices import gloo, npu_package
from lightning_replica.errors import ConfigurationError

NEEDED = gloo.NAME  # carries the host's tensors


def accelerators() -> dict[str, str]:
    """Return the names of the devices found, for every known kind; an empty name if none was found."""
    cuda = [torch.cuda.get_device_name(index) for index in range(torch.cuda.device_count())]
    return {"cuda": ", ".join(cuda), "npu": ", ".join(_npus())}


def _npus() -> list[str]:
    try:
        torch_npu = npu_package.load_with_devices()
    except ConfigurationError:
        return []
    return [torch_npu.npu.get_device_name(index) for index in range(torch_npu.npu.device_count())]


def backends() -> dict[str, bool]:
    """Return whether each known backend of torch.distributed is available."""
    return {name: dist.is_backend_available(name) for name in (NEEDED, "nccl", "hccl")}
