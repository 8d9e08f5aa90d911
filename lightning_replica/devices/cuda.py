"""NVIDIA GPUs as a device. Gloo carries the host's tensors, NCCL the device's.

[Note: contexts]
An error of a kernel stays with the process: every later call raises it again, whatever the call is, until the process
ends. So nothing can be repaired in place. `classify` separates such errors from those that leave the device usable.

[Note: all aborts at once]
NCCL's abort of one communicator waits until the kernels behind its own have ended, too. These may stand behind a kernel
of another communicator, which waits for a rank that is gone (pytorch issue 119797, NVIDIA/nccl issue 1013). So one
abort after the other never ends. All of them run at once, each in its own thread: every kernel is told to end before
any abort needs the device.

The messages of torch: "CUDA error: " and the text of ``cudaGetErrorString``, from 2.8 on as `torch.AcceleratorError`,
which has the number too (c10/cuda/CUDAException.cpp); "NCCL error in: ", the text of ``ncclGetErrorString`` and a line
that begins with its name (torch/csrc/distributed/c10d/NCCLUtils.cpp).
"""

import logging
import os
import re
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import nullcontext
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from lightning_replica._compat.torch import backend_of
from lightning_replica.devices import gloo, host
from lightning_replica.devices.exceptions import first_line, with_causes
from lightning_replica.devices.interface import DeviceFault, Level, Survived
from lightning_replica.exit_codes import DEVICE_LOST

log = logging.getLogger(__name__)

# By default, torch's watchdog ends the process when a peer is gone, or sleeps for a minute, which a shutdown waits for.
_VARIABLES = {
    "TORCH_NCCL_ASYNC_ERROR_HANDLING": "0",
    "TORCH_NCCL_BLOCKING_WAIT": "0",  # a wait would end the process after its time-out
    "TORCH_NCCL_DUMP_ON_TIMEOUT": "0",
    "TORCH_NCCL_WAIT_TIMEOUT_DUMP_MILSEC": "1",
    "TORCH_NCCL_ENABLE_MONITORING": "0",
    "TORCH_NCCL_RETHROW_CUDA_ERRORS": "0",
    # NCCL 2.28 crashes when it is aborted while it connects to a rank that has died: it must do so before training.
    "NCCL_RUNTIME_CONNECT": "0",
    # It holds the GIL while the device's queue is full, which may be so for as long as a peer is gone.
    "TORCHINDUCTOR_USE_STATIC_CUDA_LAUNCHER": "0",
    "NCCL_NVLS_ENABLE": "0",  # no abort ends the kernels of NVLink SHARP; this package has no use for it
}
# With these, a survivor's kernel may write to memory that a dead peer has freed, and torch wraps all groups.
_HARMFUL = {"NCCL_CUMEM_ENABLE": "0", "TORCH_DISTRIBUTED_DEBUG": "DETAIL", "TORCH_NCCL_DESYNC_DEBUG": "1"}
_ABORT_S = 30.0
_CLEAN_S = 30.0
_POLL_S = 0.0005

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
        for name, harmful in _HARMFUL.items():
            if os.environ.get(name) == harmful:
                log.warning("%s=%s may end a rank that could recover. Leave it unset.", name, harmful)

    def stop(self) -> None:
        """Do nothing: aborting NCCL ends its kernels, and all other kernels end without other ranks."""

    def clean(self, held: Mapping[str, Tensor]) -> Survived:
        """Report that everything survived if the context still works; also free cached memory of the step."""
        failure = _failure_within(_CLEAN_S, partial(torch.cuda.synchronize, self._device))
        if failure is not None:
            log.warning("%s can no longer be used: %s", self._device, first_line(failure))
            return Survived("nothing")
        torch.cuda.empty_cache()
        return Survived("all")

    def restart(self) -> None:
        """Make the training thread use the device's default stream again."""
        torch.cuda.set_device(self._device)
        torch.cuda.set_stream(torch.cuda.default_stream(self._device))

    def abort_groups(self, groups: Sequence[ProcessGroup]) -> None:
        """Abort both backends: threads that wait on the host wake up, and NCCL's kernels end.

        If they do not end within half a minute, end the process: nothing else frees the device, and a new process can
        take its place. See [Note: all aborts at once].
        """
        for group in groups:
            gloo.abort_group(group)
        communicators = [own for group in groups if (own := self._nccl_of(group)) is not None]
        if _end_within(_ABORT_S, [partial(_abort, own) for own in communicators]):
            return
        log.error("NCCL could not be aborted within %.0f s. This process ends.", _ABORT_S)
        os._exit(DEVICE_LOST)

    def connect(self, group: ProcessGroup) -> Callable[[], bool]:
        """Connect NCCL now: in the first collective, nothing could call this rank away."""
        if self._nccl_of(group) is None:
            return lambda: True
        connecting = _Call(partial(self._connect, group))

        def is_connected() -> bool:
            if connecting.failure is not None:
                raise connecting.failure
            return connecting.has_ended

        return is_connected

    def _connect(self, group: ProcessGroup) -> None:
        """Connect all ranks with each other, which NCCL does only when a first message asks for it."""
        self._nccl_of(group).eager_connect_single_device(self._device)
        _exchange(group, self._device)

    def _nccl_of(self, group: ProcessGroup) -> Any:
        """Return what carries the device's tensors in ``group``; None if gloo does, or nothing."""
        own = backend_of(group, self._device)
        return None if own is None or own.name() == gloo.NAME else own

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


def _exchange(group: ProcessGroup, device: torch.device) -> None:
    """Send a byte from each rank of the group to each other."""
    with torch.cuda.device(device), torch.cuda.stream(torch.cuda.Stream(device)):
        sent = torch.zeros(group.size(), dtype=torch.uint8, device=device)
        work = group.alltoall_base(torch.empty_like(sent), sent, [], [])
        while not work.is_completed():
            time.sleep(_POLL_S)


def _abort(communicator: Any) -> None:
    try:
        communicator.abort()
    except RuntimeError as error:  # `Cuda.clean` finds out whether the device can still be used
        log.warning("NCCL's abort: %s", first_line(error))


class _Call:
    """A call in a thread of its own, which is left behind if it never returns."""

    def __init__(self, function: Callable[[], object]) -> None:
        self.failure: RuntimeError | None = None
        self._function = function
        self._thread = threading.Thread(target=self._run, name="lightning_replica-cuda", daemon=True)
        self._thread.start()

    def _run(self) -> None:
        try:
            self._function()
        except RuntimeError as error:
            self.failure = error

    @property
    def has_ended(self) -> bool:
        return not self._thread.is_alive()

    def ends_by(self, deadline: float) -> bool:
        """Wait until the call returns, or until ``deadline``, by `time.monotonic`."""
        self._thread.join(max(0.0, deadline - time.monotonic()))
        return self.has_ended


def _end_within(limit_s: float, functions: Iterable[Callable[[], object]]) -> bool:
    """Call all ``functions`` at once; return whether they have returned within ``limit_s``."""
    calls = [_Call(function) for function in functions]
    deadline = time.monotonic() + limit_s
    return all(call.ends_by(deadline) for call in calls)


def _failure_within(limit_s: float, function: Callable[[], object]) -> RuntimeError | None:
    """Call a function; return what it raises, or an error if it does not return within ``limit_s``."""
    call = _Call(function)
    if not call.ends_by(time.monotonic() + limit_s):
        return RuntimeError(f"what it computes has not ended within {limit_s:.0f} s")
    return call.failure
