"""What a device that was stopped still holds."""

import logging

from lightning_replica.control.generation import Generations
from lightning_replica.core.recoverable import Recoverable
from lightning_replica.devices.interface import Device
from lightning_replica.errors import DeviceLostError, RecoveryError

log = logging.getLogger(__name__)


def clean(device: Device, state: Recoverable, generations: Generations) -> tuple[bool, ...]:
    """Find out what a stopped device still holds; mark a lost shard in ``state``, and a spoiled run in the store.

    Returns:
        For each process group, whether the device has connections that could resume (`Survived.links`).

    Raises:
        DeviceLostError: If this process cannot use its device any more.
        RecoveryError: If no rank can continue, because nobody can tell which wrong bits the other ranks were given.
    """
    survived = device.clean(state.held())
    if survived.level == "nothing":
        raise DeviceLostError("its memory or its context is lost")
    if survived.level == "spoiled":
        generations.forbid_saving()
        raise RecoveryError(
            "A memory error may have happened before the newest update and may thus be in every rank's shard. Resume"
            " from the last checkpoint."
        )
    if survived.level != "all" or device.stops:
        state.lose_results()
    if survived.level == "rebuild":
        log.warning("memory errors have hit %s; a peer gives the shard back", ", ".join(survived.hit))
        state.lose()
    return survived.links
