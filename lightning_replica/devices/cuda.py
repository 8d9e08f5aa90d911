"""NVIDIA GPUs. The host's tensors go over gloo, the device's over NCCL.

[Note: contexts]
An error of a kernel stays with the process: every later call raises it again, whatever the call is, until the process
ends. So nothing can be repaired in place. `classify` tells such errors from those after which the device is as before.

What torch says: "CUDA error: " and the text of ``cudaGetErrorString``, from 2.8 on as `torch.AcceleratorError`, which
has the number too (c10/cuda/CUDAException.cpp); "NCCL error in: ", the text of ``ncclGetErrorString`` and a line that
begins with its name (torch/csrc/distributed/c10d/NCCLUtils.cpp).
"""

import logging
import os
import re
from collections.abc import Mapping, Sequence
from contextlib import nullcontext

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from lightning_replica._compat.torch import backend_of
from lightning_replica.devices import gloo, host
from lightning_replica.devices.exceptions import first_line, with_causes
from lightning_replica.devices.interface import DeviceFault, Level, Survived

log = logging.getLogger(__name__)

# By default torch's watchdog ends the process when a peer is gone; and a wait that blocks does so too, in time.
_VARIABLES = {"TORCH_NCCL_ASYNC_ERROR_HANDLING": "0", "TORCH_NCCL_BLOCKING_WAIT": "0"}

# The first that is found in the message decides. None: a mistake in a call, after which the device is as before.
_TEXTS: tuple[tuple[str, Level | None], ...] = (
    (r"in DataLoader worker process", None),  # another process's device
    (r"(?i)cuda.{0,30}out of memory|CUBLAS_STATUS_ALLOC_FAILED", "exhausted"),
    (r"unhandled cuda error", "lost"),  # this rank's own, met by NCCL first
    (r"CUDA error: invalid (argument|configuration argument|device ordinal|device function|resource handle)", None),
    (r"CUDA error: (no kernel image is available|too many resources requested)", None),
    (r"CUDA error: CUBLAS_STATUS_(INVALID_VALUE|NOT_SUPPORTED)", None),
    (r"CUDA (driver )?error|\bXid\b", "lost"),
)


class Cuda:
    """`Device` for ranks that train on an NVIDIA GPU.

    Args:
        index: Which of the GPUs that this process sees.
        backend: For torch.distributed.
    """

    kind = "cuda"
    is_host = False
    fence = nullcontext()

    def __init__(self, index: int, backend: str = "cpu:gloo,cuda:nccl") -> None:
        self._device, self.backend = torch.device(self.kind, index), backend
        for name, needed in _VARIABLES.items():
            given = os.environ.setdefault(name, needed)
            if given != needed:
                log.warning("%s=%s: a rank may end where it could recover. Leave it unset, or %s.", name, given, needed)

    def stop(self) -> None:
        """Aborting NCCL ends its kernels, and no other kernel needs another rank to end."""

    def clean(self, held: Mapping[str, Tensor]) -> Survived:
        """Everything, if the context is sound; memory that the step under way held is given back."""
        try:
            torch.cuda.synchronize(self._device)
        except RuntimeError as error:
            log.warning("%s cannot be used any more: %s", self._device, first_line(error))
            return Survived("nothing")
        torch.cuda.empty_cache()
        return Survived("all")

    def restart(self) -> None:
        """Has the thread that trains use the device's default stream again."""
        torch.cuda.set_device(self._device)
        torch.cuda.set_stream(torch.cuda.default_stream(self._device))

    def abort_groups(self, groups: Sequence[ProcessGroup]) -> None:
        """Both halves: whoever waits on the host wakes, and NCCL's kernels end."""
        for group in groups:
            gloo.abort_group(group)
        for group in groups:
            own = backend_of(group, self._device)
            if own is not None and own.name() != gloo.NAME:
                own.abort()

    def resume_groups(self, groups: Sequence[ProcessGroup]) -> bool:
        """NCCL's communicators cannot be used after an abort, which is what ends their kernels."""
        return False

    def classify(self, error: BaseException) -> DeviceFault | None:
        """By the message of ``error``, or of the error that it came from."""
        for each in with_causes(error):
            for pattern, level in _TEXTS:
                if isinstance(each, RuntimeError) and re.search(pattern, str(each)):
                    code = getattr(each, "error_code", None)
                    return None if level is None else DeviceFault(level, first_line(each), code)
            if gloo.is_collective_failure(each):
                return DeviceFault("outside", first_line(each))
        return None

    def rng_state(self) -> bytes:
        """The host's generators and the device's."""
        return host.rng_state() + torch.cuda.get_rng_state(self._device).numpy().tobytes()

    def set_rng_state(self, state: bytes) -> None:
        """The inverse of `rng_state`."""
        host.set_rng_state(state)
        own = host.added_to(state)
        if own:
            torch.cuda.set_rng_state(torch.frombuffer(bytearray(own), dtype=torch.uint8), self._device)
