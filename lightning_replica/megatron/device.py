"""What megatron-core keeps on a rank beside its model: a part of the device's random state, with which it goes back."""

import struct
from typing import Any, cast

import torch
from torch import Tensor

from lightning_replica._compat import megatron
from lightning_replica.core import plain
from lightning_replica.devices.interface import Device

_SIZE = struct.Struct("<Q")
_RERUN = "rerun state machine"  # among the names of generators, which are the user's; older checkpoints have none


class _WithMegatron:
    """A device whose random state includes megatron-core's generators and its RerunStateMachine.

    Everything else is the device's own.

    Args:
        device: The device.
    """

    def __init__(self, device: Device) -> None:
        self._device = device
        self._newest: tuple[dict[str, Any], bytes] = {}, plain.save({})  # the newest state, and its record

    def __getattr__(self, name: str) -> Any:
        return getattr(self._device, name)

    def rng_state(self) -> bytes:
        """Return the state of all generators."""
        rerun = megatron.rerun_state()
        found = self._record(megatron.generator_states() | ({} if rerun is None else {_RERUN: rerun}))
        return self._device.rng_state() + found + _SIZE.pack(len(found))

    def set_rng_state(self, state: bytes) -> None:
        """Restore what `rng_state` has returned."""
        (size,) = _SIZE.unpack_from(state, len(state) - _SIZE.size)
        end = len(state) - _SIZE.size
        self._device.set_rng_state(state[: end - size])
        found = plain.load(state[end - size : end])
        megatron.set_rerun_state(found.pop(_RERUN, None))
        megatron.set_generator_states(found)

    def _record(self, found: dict[str, Any]) -> bytes:
        """Return what stands for ``found``. Without dropout generators never change, and are not written anew."""
        known, record = self._newest
        if not _are_same(found, known):
            record = plain.save(found)
            self._newest = {name: _copy(value) for name, value in found.items()}, record
        return record


def _are_same(a: dict[str, Any], b: dict[str, Any]) -> bool:
    return a.keys() == b.keys() and all(_is_same(a[name], b[name]) for name in a)


def _is_same(a: Any, b: Any) -> bool:
    return torch.equal(a, b) if isinstance(a, Tensor) else bool(a == b)


def _copy(value: Any) -> Any:
    return value.clone() if isinstance(value, Tensor) else value


def with_megatron(device: Device) -> Device:
    """Return ``device`` with what megatron-core keeps among its generators."""
    return cast("Device", _WithMegatron(device))
