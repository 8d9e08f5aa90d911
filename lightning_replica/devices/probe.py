"""Which devices and backends a machine has, for people to read."""

import importlib.util

import torch
import torch.distributed as dist

from lightning_replica.devices import gloo

NEEDED = gloo.NAME  # carries the host's tensors


def accelerators() -> dict[str, str]:
    """For every kind that is known, what was found; empty if nothing was."""
    cuda = [torch.cuda.get_device_name(index) for index in range(torch.cuda.device_count())]
    npu = importlib.util.find_spec("torch_npu") is not None
    return {"cuda": ", ".join(cuda), "npu": "torch_npu is installed" if npu else ""}


def backends() -> dict[str, bool]:
    """For every backend of torch.distributed that is known, whether it is there."""
    return {name: dist.is_backend_available(name) for name in (NEEDED, "nccl", "hccl")}
