"""CPU and gloo."""

import random
import struct
from datetime import timedelta

import numpy as np
import torch
import torch.distributed as dist

# Not used by any other point-to-point message on these groups.
_ABORT_TAG = 0x7E57


def abort_group(group: dist.ProcessGroup) -> None:
    """Fails every collective of ``group`` on this rank, from any thread, and tells the peers.

    gloo has no abort, and ``_abort_process_group`` does not wake a rank that is blocked in a collective. But when
    the wait for a point-to-point message expires, gloo closes every connection of the group ("Application timeout
    caused pair closure"): so a receive that nobody will answer, given one millisecond, is an abort
    (tests/devices/test_cpu.py).
    """
    for peer in range(group.size()):
        if peer == group.rank():
            continue
        try:
            group.recv([torch.empty(1)], peer, _ABORT_TAG).wait(timedelta(milliseconds=1))
        except RuntimeError as error:
            if "Timed out" in str(error):
                return
            # The connection to this peer was closed already; the others may still be open.


def rng_state() -> bytes:
    """State of the generators of torch (CPU), numpy and python, in a few fixed-size records."""
    torch_state = torch.get_rng_state().numpy().tobytes()
    name, keys, position, has_gauss, gauss = np.random.get_state(legacy=True)
    numpy_state = struct.pack("<qqd", position, has_gauss, gauss) + np.asarray(keys, dtype=np.uint32).tobytes()
    version, internal, gauss_next = random.getstate()
    python_state = struct.pack("<q?d625q", version, gauss_next is not None, gauss_next or 0.0, *internal)
    return struct.pack("<qq", len(torch_state), len(numpy_state)) + torch_state + numpy_state + python_state


def set_rng_state(state: bytes) -> None:
    """The inverse of `rng_state`."""
    torch_size, numpy_size = struct.unpack_from("<qq", state)
    start = struct.calcsize("<qq")
    torch_state = bytearray(state[start : start + torch_size])
    numpy_state = state[start + torch_size : start + torch_size + numpy_size]
    python_state = state[start + torch_size + numpy_size :]
    torch.set_rng_state(torch.frombuffer(torch_state, dtype=torch.uint8))
    position, has_gauss, gauss = struct.unpack_from("<qqd", numpy_state)
    keys = np.frombuffer(numpy_state, dtype=np.uint32, offset=struct.calcsize("<qqd"))
    np.random.set_state(("MT19937", keys, position, has_gauss, gauss))
    version, has_next, gauss_next, *internal = struct.unpack("<q?d625q", python_state)
    random.setstate((version, tuple(internal), gauss_next if has_next else None))


def is_collective_failure(error: BaseException) -> bool:
    """Whether torch.distributed raised ``error`` because another rank is gone or a group was aborted."""
    if isinstance(error, dist.DistError):
        return True
    words = ("gloo", "Connection closed by peer", "pair closure", "process group has not been initialized")
    return isinstance(error, (RuntimeError, ValueError)) and any(word in str(error) for word in words)
