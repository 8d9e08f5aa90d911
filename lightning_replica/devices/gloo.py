"""Gloo, which carries the host's tensors for every kind of device."""

from datetime import timedelta

import torch
import torch.distributed as dist

NAME = "gloo"

# No other point-to-point message on these groups uses this tag.
_ABORT_TAG = 0x7E57


def backend_beside(device: torch.device) -> str:
    """Return the backend argument with which gloo carries the host's tensors, and torch's choice the device's."""
    own = dist.Backend.default_device_backend_map.get(device.type, NAME)
    return NAME if device.type == "cpu" else f"cpu:{NAME},{device.type}:{own}"


def abort_group(group: dist.ProcessGroup) -> None:
    """Make every collective of ``group`` fail, on this rank and on the others. Can be called from any thread.

    Gloo has no abort, and ``_abort_process_group`` does not wake a rank that is blocked in a collective. But when
    the wait for a point-to-point message times out, gloo closes every connection of the group ("Application timeout
    caused pair closure"). So a receive that no rank answers, with a time-out of one millisecond, works as an abort
    (tests/sharding/test_collectives.py).
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


def is_collective_failure(error: BaseException) -> bool:
    """Return whether torch.distributed raised ``error`` because another rank is gone or a group was aborted."""
    if isinstance(error, dist.DistError):
        return True
    words = (NAME, "Connection closed by peer", "pair closure", "process group has not been initialized")
    return isinstance(error, (RuntimeError, ValueError)) and any(word in str(error) for word in words)
