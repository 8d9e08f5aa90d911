"""NVIDIA GPUs as a device. Gloo carries the host's tensors, NCCL the device's.

[Note: contexts]
An error of a kernel stays with the process: every later call raises it again, whatever the call is, until the process
ends. So nothing can be repaired in place. `classify` separates such errors from those that leave the device usable.

The messages of torch: "CUDA error: " and the text of ``cudaGetErrorString``, from 2.8 on as `torch.AcceleratorError`,
which has the number too (c10/cuda/CUDAException.cpp); "NCCL error in: ", the text of ``ncclGetErrorString`` and a line
that begins with its name (torch/csrc/distributed/c10d/NCCLUtils.cpp).
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

# By default, torch's watchdog ends the process when a peer is gone. A blocking wait does so too, after its time-out.
_VARIABLES = {"TORCH_NCCL_ASYNC_ERROR_HANDLING": "0", "TORCH_NCCL_BLOCKING_WAIT": "0"}

# The first pattern that the message contains decides. None: a mistake in a call, which leaves the device usable.
_TEXTS: tuple[tuple[str, Level | None], ...] = (
    (r"in DataLoader worker process", None),  # the device of another process
    (r"(?i)cuda.{0,30}out of memory|CUBLAS_STATUS_ALLOC_FAILED", "exhausted"),
    (r"unhandled cuda error", "lost"),  # an error of this rank's own device, which NCCL noticed first
    (r"CUDA error: invalid (argument|configuration argument|device ordinal|device function|resource handle)", None),
    (r"CUDA error: (no kernel image is available|too many resources requested)", None),
    (r"CUDA error: CUBLAS_STATUS_(INVALID_VALUE|NOT_SUPPORTED)", None),
    (r"CUDA (driver )?error|\bXid\b", "lost"),
)


class Cuda:
    """`Device` for ranks that train on an NVIDIA GPU.

    Args:
        index: Index of the GPU among those that this process sees.
        backend: The backend for torch.distributed.
    """

    kind = "cuda"
    is_host, stops = False, False
    fence = nullcontext()

    def __init__(self, index: int, backend: str = "cpu:gloo,cuda:nccl") -> None:
        self._device, self.backend = torch.device(self.kind, index), backend
        for name, needed in _VARIABLES.items():
            given = os.environ.setdefault(name, needed)
            if given != needed:
                log.warning("%s=%s may end a rank that could recover. Leave it unset, or set %s.", name, given, needed)

    def stop(self) -> None:
        """Do nothing: aborting NCCL ends its kernels, and all other kernels end without other ranks."""

    def clean(self, held: Mapping[str, Tensor]) -> Survived:
        """Report that everything survived if the context still works; also free cached memory of the step."""
        try:
            torch.cuda.synchronize(self._device)
        except RuntimeError as error:
            log.warning("%s can no longer be used: %s", self._device, first_line(error))
            return Survived("nothing")
        torch.cuda.empty_cache()
        return Survived("all")

    def restart(self) -> None:
        """Make the training thread use the device's default stream again."""
        torch.cuda.set_device(self._device)
        torch.cuda.set_stream(torch.cuda.default_stream(self._device))

    def abort_groups(self, groups: Sequence[ProcessGroup]) -> None:
        """Abort both backends: threads that wait on the host wake up, and NCCL's kernels end."""
        for group in groups:
            gloo.abort_group(group)
        for group in groups:
            own = backend_of(group, self._device)
            if own is not None and own.name() != gloo.NAME:
                own.abort()

    def resume_groups(self, groups: Sequence[ProcessGroup]) -> bool:
        """Return False: only an abort ends NCCL's kernels, and its communicators cannot be used after an abort."""
        return False

    def classify(self, error: BaseException) -> DeviceFault | None:
        """Classify ``error`` by its message, or by the message of the error that it was raised from."""
        for each in with_causes(error):
            for pattern, level in _TEXTS:
                if isinstance(each, RuntimeError) and re.search(pattern, str(each)):
                    code = getattr(each, "error_code", None)
                    return None if level is None else DeviceFault(level, first_line(each), code)
            if gloo.is_collective_failure(each):
                return DeviceFault("outside", first_line(each))
        return None

    def rng_state(self) -> bytes:
        """Return the state of the host's generators and the device's."""
        return host.rng_state() + torch.cuda.get_rng_state(self._device).numpy().tobytes()

    def set_rng_state(self, state: bytes) -> None:
        """Restore what `rng_state` returned."""
        host.set_rng_state(state)
        own = host.added_to(state)
        if own:
            torch.cuda.set_rng_state(torch.frombuffer(bytearray(own), dtype=torch.uint8), self._device)
