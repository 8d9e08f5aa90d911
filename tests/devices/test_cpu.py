"""The CPU behind the interface; how it aborts groups is tested in tests/sharding/test_collectives.py."""

from typing import Any

import pytest
import torch
import torch.distributed as dist
from lightning.pytorch.accelerators import CPUAccelerator

from lightning_replica.devices import device_for
from lightning_replica.devices.cpu import Cpu
from lightning_replica.devices.host import HOST
from lightning_replica.devices.interface import Survived
from lightning_replica.errors import ConfigurationError
from tests.support.doubles import overriding


def test_a_users_own_error_is_not_the_devices() -> None:
    device = Cpu()
    assert device.classify(RuntimeError("shapes (3,4) and (5,6) not aligned")) is None
    assert device.classify(KeyError("gloo")) is None
    for error in (RuntimeError("Application timeout caused pair closure"), dist.DistNetworkError("recv")):
        fault = device.classify(error)
        assert fault is not None
        assert (fault.level, fault.text) == ("outside", str(error))


def test_what_survived_goes_with_what_was_hit() -> None:
    assert Survived("rebuild", ("shard",)).hit == ("shard",)
    for level, hit in (("rebuild", ()), ("all", ("shard",))):
        with pytest.raises(ValueError, match="does not fit"):
            Survived(level, hit)  # type: ignore[arg-type]


@overriding(new=("recovery_device",))
class Own(CPUAccelerator):
    """Of a third party."""

    def recovery_device(self, root_device: torch.device) -> Any:
        return root_device, "own"


def test_an_accelerator_may_bring_its_own() -> None:
    assert isinstance(device_for(HOST, CPUAccelerator()), Cpu)
    own: Any = device_for(HOST, Own())
    assert own == (HOST, "own")
    with pytest.raises(ConfigurationError, match="trains on 'meta'; `replica_zero` runs on cpu, cuda"):
        device_for(torch.device("meta"), CPUAccelerator())
