"""What an exception means: whose fault it is, and whether this rank can continue. Only this file decides that.

| exception | means |
|---|---|
| a pattern of `register_fault`, or a known error of the device | a device fault, with a level that says what is lost |
| a DataLoader's worker has died | a fault of this rank's machine: the rank retries |
| CollectiveError, Interrupted, an error of torch.distributed | another rank's fault, which that rank will report |
| TransferError, CorruptedShardError in a recovery | a fault of a rank's memory or of the wire: the recovery restarts |
| the store is gone | a fault for all ranks: none of them can continue |
| anything else in training | a fault of user code: the step is done again, and the error is shown |
| anything else in a recovery | a bug in this package, or a final error |
"""

from dataclasses import dataclass
from typing import Literal

import torch.distributed as dist

from lightning_replica.devices.exceptions import explain, first_line, with_causes
from lightning_replica.devices.interface import Device, DeviceFault
from lightning_replica.devices.registered import fault_of
from lightning_replica.errors import (
    CollectiveError,
    CorruptedShardError,
    DeviceLostError,
    Interrupted,
    ReplicaError,
    TransferError,
    WorkerDiedError,
)

_AGAIN = (CollectiveError, Interrupted, TransferError, CorruptedShardError)
_STORE = (dist.DistNetworkError, dist.DistStoreError)  # the store is gone, so no rank can continue


@dataclass(frozen=True)
class OwnFault:
    """What has stopped this rank by itself, and not because of another rank.

    Attributes:
        detected: How it is recorded: an exception of user code, an error of the device, the death of a DataLoader's
            worker.
        text: One line for the user.
        loses_device: Whether this process cannot use its device any more.
    """

    detected: Literal["exception", "device error", "worker death"]
    text: str
    loses_device: bool = False

    @property
    def is_exception(self) -> bool:
        """Whether it is an exception of user code, which may come again on every rank."""
        return self.detected == "exception"


def worker_died(error: BaseException) -> bool:
    """Return whether an exception says that a worker of a DataLoader has died."""
    return any(isinstance(each, WorkerDiedError) for each in with_causes(error))


def fault_behind(error: BaseException, device: Device) -> DeviceFault | None:
    """Return the fault of ``device``, a data worker or another rank that caused ``error``; None if user code did."""
    fault = fault_of(error, device)
    if fault is None and worker_died(error):
        return DeviceFault("retry", first_line(error))  # workers of all ranks may die: too little memory
    if fault is None and isinstance(error, (CollectiveError, Interrupted)):
        return DeviceFault("outside", str(error))
    return fault


def own_fault(error: BaseException, device: Device) -> OwnFault | None:
    """Return what has stopped this rank in training by ``error``; None if another rank has caused it."""
    fault = fault_behind(error, device)
    if fault is None:
        return OwnFault("exception", explain(error))
    if fault.level == "outside":
        return None
    return OwnFault("worker death" if worker_died(error) else "device error", fault.text, fault.level == "lost")


def begins_again(error: Exception, device: Device) -> OwnFault | None:
    """Decide whether a recovery that ``error`` cuts short restarts, as after a fault of another rank.

    Returns:
        The error of this rank's own device; None if the fault is another rank's.

    Raises:
        DeviceLostError: If this process cannot use its device any more.
        Exception: ``error`` itself, if it is a bug or final.
    """
    again = isinstance(error, _AGAIN)
    ours = isinstance(error, ReplicaError) and not again
    fault = None if ours or isinstance(error, _STORE) else fault_of(error, device)
    if fault is not None and fault.level == "lost":
        raise DeviceLostError(fault.text) from error
    if fault is None and not again:
        raise error
    return None if fault is None or fault.level == "outside" else OwnFault("device error", fault.text)
