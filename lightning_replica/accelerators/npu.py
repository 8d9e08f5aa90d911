"""Lightning accelerator for Huawei's Ascend NPUs: ``Trainer(accelerator="npu")``. `devices.npu` does the recovery."""

import warnings
from collections.abc import Sequence
from typing import Any

import torch

from lightning_replica._compat.lightning_names import Accelerator, _AcceleratorRegistry, pl
from lightning_replica.devices import npu_package
from lightning_replica.devices.npu_contract import DEVICE_TYPE
from lightning_replica.errors import ConfigurationError

Devices = int | str | Sequence[int]


class NPUAccelerator(Accelerator):
    """Accelerator that trains on Ascend NPUs through torch_npu.

    Raises:
        ConfigurationError: If torch_npu is missing, was made for another torch, cannot be imported, or finds no NPU.
    """

    def __init__(self) -> None:
        # Raise here: if only `is_available` failed, Lightning would just say "can not run on your system".
        npu_package.load_with_devices()
        # Lightning makes the loss scaler of 16-mixed for CUDA; the strategy replaces it (`precision.fit_to_device`).
        warnings.filterwarnings("ignore", r".*GradScaler is enabled, but CUDA is not available", UserWarning)

    @staticmethod
    def name() -> str:
        """Return the name that ``Trainer(accelerator=...)`` takes."""
        return DEVICE_TYPE

    @classmethod
    def register_accelerators(cls, accelerator_registry: _AcceleratorRegistry) -> None:
        """Register this class, so that ``Trainer(accelerator="npu")`` finds it."""
        description = (cls.__doc__ or "").partition("\n")[0]
        accelerator_registry.register(cls.name(), cls, description=description, override=True)

    @staticmethod
    def is_available() -> bool:
        """Return whether there is an NPU that can be used. Lightning calls this on all accelerators."""
        try:
            npu_package.load_with_devices()
        except ConfigurationError:
            return False
        return True

    @staticmethod
    def auto_device_count() -> int:
        """Return the number of NPUs that this process may use."""
        torch_npu = npu_package.load()
        return int(torch_npu.npu.device_count())

    @staticmethod
    def parse_devices(devices: Devices) -> list[int]:
        """Return the indices of the NPUs that ``devices`` selects.

        2 and "2" select the first two, [0, 2] and "0,2" these two, "2," the third, and -1 all.

        Raises:
            ConfigurationError: If ``devices`` cannot be read, selects no NPU or one twice, or one that does not exist.
        """
        return chosen(devices, NPUAccelerator.auto_device_count())

    @staticmethod
    def get_parallel_devices(devices: list[int]) -> list[torch.device]:
        """Return the devices with these indices."""
        return [torch.device(DEVICE_TYPE, index) for index in devices]

    def setup_device(self, device: torch.device) -> None:
        """Make ``device`` the current NPU of this process.

        Raises:
            ConfigurationError: If ``device`` is not an NPU.
        """
        if device.type != DEVICE_TYPE:
            raise ConfigurationError(f"accelerator={DEVICE_TYPE!r} cannot train on {str(device)!r}.")
        torch_npu = npu_package.load()
        torch_npu.npu.set_device(device)

    def setup(self, trainer: "pl.Trainer") -> None:
        """Check that loss scaling can work, and free cached memory, as Lightning does on GPUs.

        Raises:
            ConfigurationError: If the loss is scaled, but numbers of this NPU saturate and show no overflow.
        """
        torch_npu = npu_package.load()
        if getattr(trainer.precision_plugin, "scaler", None) and not torch_npu.npu.utils.is_support_inf_nan():
            raise ConfigurationError(
                f"precision={trainer.precision_plugin.precision!r} must see gradients overflow, but numbers saturate on"
                " this NPU (Ascend 910A, or INF_NAN_MODE_ENABLE=0), so an overflow would go unnoticed. Set"
                " `Trainer(precision='bf16-mixed')` or '32-true'."
            )
        torch_npu.npu.empty_cache()

    def teardown(self) -> None:
        """Free cached memory."""
        torch_npu = npu_package.load()
        torch_npu.npu.empty_cache()

    def get_device_stats(self, device: Any) -> dict[str, Any]:
        """Return what `DeviceStatsMonitor` logs: the allocator's numbers under CUDA's names, and the device's."""
        torch_npu = npu_package.load()
        free, total = torch_npu.npu.mem_get_info(device)
        return {
            **torch_npu.npu.memory_stats(device),
            "memory.free_bytes": free,
            "memory.total_bytes": total,
            "utilization.percent": torch_npu.npu.utilization(device),
        }


def chosen(devices: Devices, count: int) -> list[int]:
    """Return what `NPUAccelerator.parse_devices` returns; ``count`` is the number of NPUs."""
    indices = _indices(devices, count)
    if indices and len({*indices}) == len(indices) and {*indices} <= {*range(count)}:
        return indices
    available = "1 NPU (0)" if count == 1 else f"{count} NPUs (0 to {count - 1})"
    raise ConfigurationError(
        f"{devices=} does not fit {available}. Give a number of NPUs, a list of different indices (`devices=[0, 1]`),"
        f" or -1 for all. {npu_package.VISIBLE} selects which of the machine's NPUs are visible."
    )


def _indices(devices: Devices, count: int) -> list[int]:
    """Return the indices as Lightning reads those of GPUs; empty if ``devices`` cannot be read."""
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
