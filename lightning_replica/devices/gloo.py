"""gloo, which carries the host's tensors whatever the device is."""

from datetime import timedelta

import torch
import torch.distributed as dist

NAME = "gloo"

# Not used by any other point-to-point message on these groups.
_ABORT_TAG = 0x7E57


def abort_group(group: dist.ProcessGroup) -> None:
    """Fails every collective of ``group`` on this rank, from any thread, and tells the peers.

    gloo has no abort, and ``_abort_process_group`` does not wake a rank that is blocked in a collective. But when
    the wait for a point-to-point message expires, gloo closes every connection of the group ("Application timeout
    caused pair closure"): so a receive that nobody will answer, given one millisecond, is an abort
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
    """Whether torch.distributed raised ``error`` because another rank is gone or a group was aborted."""
    if isinstance(error, dist.DistError):
        return True
    words = (NAME, "Connection closed by peer", "pair closure", "process group has not been initialized")
    return isinstance(error, (RuntimeError, ValueError)) and any(word in str(error) for word in words)
