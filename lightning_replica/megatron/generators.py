"""The random generators of tensor parallel regions, as a part of a device's."""

import struct
from collections.abc import Mapping
from typing import Any, cast

import torch
from torch import Tensor

from lightning_replica._compat import megatron
from lightning_replica.core import plain
from lightning_replica.devices.interface import Device

_SIZE = struct.Struct("<Q")


class _WithTracker:
    """A device whose random state includes that of megatron-core's tracker. Everything else is the device's own.

    Args:
        device: The device.
    """

    def __init__(self, device: Device) -> None:
        self._device = device
        self._tracked: tuple[dict[str, Tensor], bytes] = {}, plain.save({})  # the newest states, and their record

    def __getattr__(self, name: str) -> Any:
        return getattr(self._device, name)

    def rng_state(self) -> bytes:
        """Return the state of all generators."""
        tracked = self._record(megatron.generator_states())
        return self._device.rng_state() + tracked + _SIZE.pack(len(tracked))

    def set_rng_state(self, state: bytes) -> None:
        """Restore what `rng_state` has returned."""
        (size,) = _SIZE.unpack_from(state, len(state) - _SIZE.size)
        end = len(state) - _SIZE.size
        self._device.set_rng_state(state[: end - size])
        megatron.set_generator_states(plain.load(state[end - size : end]))

    def _record(self, states: dict[str, Tensor]) -> bytes:
        """Return what stands for ``states``. Without dropout they never change, and are not written anew."""
        known, record = self._tracked
        if not _are_same(states, known):
            record = plain.save(states)
            self._tracked = {name: state.clone() for name, state in states.items()}, record
        return record


def _are_same(a: Mapping[str, Tensor], b: Mapping[str, Tensor]) -> bool:
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


def with_tracker(device: Device) -> Device:
    """Return ``device`` with megatron-core's generators among its own."""
    return cast("Device", _WithTracker(device))
