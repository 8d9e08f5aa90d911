"""Huawei's Ascend NPUs for Lightning: ``Trainer(accelerator="npu")``. How they recover is `devices.npu`'s business."""

import warnings
from collections.abc import Sequence
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.accelerators import Accelerator

from lightning_replica._compat.lightning import _AcceleratorRegistry
from lightning_replica.devices import npu_package
from lightning_replica.devices.npu_contract import DEVICE_TYPE
from lightning_replica.errors import ConfigurationError

Devices = int | str | Sequence[int]


class NPUAccelerator(Accelerator):
    """Trains on Ascend NPUs, through torch_npu.

    Raises:
        ConfigurationError: If torch_npu is missing, made for another torch, cannot be imported, or finds no NPU.
    """

    def __init__(self) -> None:
        # Here and not in `is_available`, which Lightning would answer with "can not run on your system".
        npu_package.load_with_devices()
        # Lightning makes 16-mixed's loss scaler for CUDA; the strategy exchanges it (`precision.fit_to_device`).
        warnings.filterwarnings("ignore", r".*GradScaler is enabled, but CUDA is not available", UserWarning)

    @staticmethod
    def name() -> str:
        """What ``Trainer(accelerator=...)`` calls it."""
        return DEVICE_TYPE

    @classmethod
    def register_accelerators(cls, accelerator_registry: _AcceleratorRegistry) -> None:
        """Makes ``Trainer(accelerator="npu")`` find this class."""
        if cls.name() not in accelerator_registry:
            accelerator_registry.register(cls.name(), cls, description=(cls.__doc__ or "").splitlines()[0])

    @staticmethod
    def is_available() -> bool:
        """Whether there is an NPU that can be used. Lightning asks this of all accelerators."""
        try:
            npu_package.load_with_devices()
        except ConfigurationError:
            return False
        return True

    @staticmethod
    def auto_device_count() -> int:
        """All that this process may use."""
        torch_npu = npu_package.load()
        return int(torch_npu.npu.device_count())

    @staticmethod
    def parse_devices(devices: Devices) -> list[int]:
        """Indices of NPUs: 2 and "2" are the first two, [0, 2] and "0,2" these two, "2," is the third, -1 all.

        Raises:
            ConfigurationError: If that makes no sense, or there are not as many.
        """
        return chosen(devices, NPUAccelerator.auto_device_count())

    @staticmethod
    def get_parallel_devices(devices: list[int]) -> list[torch.device]:
        """Those of the indices."""
        return [torch.device(DEVICE_TYPE, index) for index in devices]

    def setup_device(self, device: torch.device) -> None:
        """Makes it this process's.

        Raises:
            ConfigurationError: If it is not an NPU.
        """
        if device.type != DEVICE_TYPE:
            raise ConfigurationError(f"accelerator={DEVICE_TYPE!r} cannot train on {str(device)!r}.")
        torch_npu = npu_package.load()
        torch_npu.npu.set_device(device)

    def setup(self, trainer: "pl.Trainer") -> None:
        """Frees memory that others have left, as Lightning does on GPUs.

        Raises:
            ConfigurationError: If losses are scaled, but the device shows no overflow.
        """
        torch_npu = npu_package.load()
        if getattr(trainer.precision_plugin, "scaler", None) and not torch_npu.npu.utils.is_support_inf_nan():
            raise ConfigurationError(
                f"precision={trainer.precision_plugin.precision!r} looks for gradients that overflow, but numbers of"
                " this NPU saturate (Ascend 910A, or INF_NAN_MODE_ENABLE=0): nobody would see it. Set"
                " `Trainer(precision='bf16-mixed')` or '32-true'."
            )
        torch_npu.npu.empty_cache()

    def teardown(self) -> None:
        """Gives memory back."""
        torch_npu = npu_package.load()
        torch_npu.npu.empty_cache()

    def get_device_stats(self, device: Any) -> dict[str, Any]:
        """What `DeviceStatsMonitor` logs: the allocator's numbers, with CUDA's names, and what the device says."""
        torch_npu = npu_package.load()
        free, total = torch_npu.npu.mem_get_info(device)
        return {
            **torch_npu.npu.memory_stats(device),
            "memory.free_bytes": free,
            "memory.total_bytes": total,
            "utilization.percent": torch_npu.npu.utilization(device),
        }


def chosen(devices: Devices, count: int) -> list[int]:
    """See `NPUAccelerator.parse_devices`; ``count`` is how many there are."""
    indices = _indices(devices, count)
    if indices and len({*indices}) == len(indices) and {*indices} <= {*range(count)}:
        return indices
    there = "1 NPU (0)" if count == 1 else f"{count} NPUs (0 to {count - 1})"
    raise ConfigurationError(
        f"{devices=} for {there}. Give how many you want, a list of the indices of some (`devices=[0, 1]`), each once,"
        f" or -1 for all. {npu_package.VISIBLE} says which of a machine's there are."
    )


def _indices(devices: Devices, count: int) -> list[int]:
    """As Lightning reads the indices of GPUs; empty if it cannot be read."""
    if isinstance(devices, bool):
        return []
    if isinstance(devices, str):
        try:
            numbers = [int(text) for text in devices.split(",") if text.strip()]
        except ValueError:
            return []
        return numbers if "," in devices else _indices(numbers[0], count) if numbers else []
    if isinstance(devices, int):
        return [*range(count if devices == -1 else devices)]
    good = isinstance(devices, Sequence) and all(type(index) is int for index in devices)
    return [*devices] if good else []
