"""What a device's errors mean for a recovery: whether it starts again, and what this rank still has."""

import logging

import torch.distributed as dist

from lightning_replica.devices.interface import Device
from lightning_replica.devices.registered import fault_of
from lightning_replica.errors import (
    CollectiveError,
    CorruptedShardError,
    DeviceLostError,
    Interrupted,
    RecoveryError,
    ReplicaError,
    TransferError,
)
from lightning_replica.recovery.generation import Generations
from lightning_replica.recovery.interface import Recoverable

log = logging.getLogger(__name__)

_AGAIN = (CollectiveError, Interrupted, TransferError, CorruptedShardError)
_STORE = (dist.DistNetworkError, dist.DistStoreError)  # the store is gone, and with it every way to go on


def begins_again(error: Exception, device: Device) -> str:
    """Whether a recovery that ``error`` cuts short starts again, as after a fault of another rank.

    Returns:
        The device's own error; empty if the fault is another rank's.

    Raises:
        DeviceLostError: If this process cannot use its device any more.
        Exception: ``error`` itself, where it is a bug or final.
    """
    again = isinstance(error, _AGAIN)
    ours = isinstance(error, ReplicaError) and not again
    fault = None if ours or isinstance(error, _STORE) else fault_of(error, device)
    if fault is not None and fault.level == "lost":
        raise DeviceLostError(fault.text) from error
    if fault is None and not again:
        raise error
    return "" if fault is None or fault.level == "outside" else fault.text


def clean(device: Device, state: Recoverable, generations: Generations) -> tuple[bool, ...]:
    """Finds out what a device that was stopped still holds, and tells whoever must know.

    Returns:
        Which process groups the device has connections for (`Survived.links`).

    Raises:
        DeviceLostError: If this process cannot use its device any more.
        RecoveryError: If no rank can go on from here, as nobody knows what wrong bits the others were given.
    """
    survived = device.clean(state.held())
    if survived.level == "nothing":
        raise DeviceLostError("its memory or its context is lost")
    if survived.level == "spoiled":
        generations.spoil()
        raise RecoveryError(
            "A memory error may have come before the newest update, and so be in every rank's shard. Go on from the"
            " last checkpoint."
        )
    if survived.level == "rebuild":
        log.warning("memory was hit: %s; the shard is taken from a peer", ", ".join(survived.hit))
        state.lose()
    return survived.links
