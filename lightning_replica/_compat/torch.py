"""Names of torch that are private, or were renamed."""

from __future__ import annotations

import io
import pickle
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.distributed import distributed_c10d
from torch.optim import Optimizer

if TYPE_CHECKING:  # costs a quarter of a second, which only those who save shall pay
    from torch.distributed.checkpoint.metadata import Metadata

_HOST = "cpu"

# Everything that occurs in the pickled `.metadata` of PyTorch Distributed Checkpoint.
_DCP_METADATA = {
    "torch": {"Size"} | {name for name, value in vars(torch).items() if isinstance(value, torch.dtype)},
    "torch.serialization": {"_get_layout"},
    "torch.distributed.checkpoint.metadata": {
        "BytesStorageMetadata",
        "ChunkStorageMetadata",
        "Metadata",
        "MetadataIndex",
        "StorageMeta",
        "TensorProperties",
        "TensorStorageMetadata",
        "_MEM_FORMAT_ENCODING",
    },
    "torch.distributed.checkpoint.filesystem": {"_StorageInfo"},
}


def data_version(tensor: Tensor) -> int:
    """Changes whenever the tensor is written to."""
    return tensor._version


def write_count(tensor: Tensor) -> int:
    """Return the `data_version`; -1 where torch keeps none, as for tensors made in inference mode."""
    return -1 if tensor.is_inference() else data_version(tensor)


def mark_stepped(optimizer: Optimizer) -> None:
    """Keeps schedulers from warning that they step before the optimizer: on a replacement it steps elsewhere."""
    optimizer._opt_called = True  # type: ignore[attr-defined]


def as_bytes(tensor: Tensor) -> memoryview:
    """The memory of a contiguous CPU tensor."""
    return memoryview(tensor.view(torch.uint8).numpy())  # type: ignore[arg-type]


def registered_groups(backend: str | None = None) -> list[torch.distributed.ProcessGroup]:
    """Every process group that this process has opened and not destroyed, the user's own too.

    Args:
        backend: Only those that have one of its backends: "gloo", or "cpu:gloo,cuda:nccl" for any of two.
    """
    groups = list(distributed_c10d._world.pg_map.items())
    return [group for group, (name, _) in groups if backend is None or _backends(name) & _backends(backend)]


def _backends(names: str) -> set[str]:
    return {name.rpartition(":")[2] for name in names.split(",")}


def failure_of(work: torch.distributed.Work) -> BaseException | None:
    """What a collective that has ended has failed with.

    torch calls this deprecated and has nothing else where ``wait`` only orders, as NCCL's does (pytorch issue 46291).
    """
    failure: BaseException | None = work.exception()
    return failure


def backend_of(group: torch.distributed.ProcessGroup, device: torch.device) -> Any | None:
    """What carries tensors of ``device`` in ``group``; None if nothing does."""
    kinds = [other.type for other in group._device_types]
    return group._get_backend(device) if device.type in kinds else None


def backend_on_host(backend: str) -> tuple[str, torch.device]:
    """Takes what ``init_process_group`` is given apart.

    Args:
        backend: One name for all devices, or "cpu:gloo,npu:hccl".

    Returns:
        What is left where only the host's tensors are carried, "cpu:gloo"; and the other device, or the host.
    """
    parts = dict(part.split(":") for part in backend.split(",")) if ":" in backend else {_HOST: backend}
    other = next((kind for kind in parts if kind != _HOST), _HOST)
    return f"{_HOST}:{parts[_HOST]}", torch.device(other)


def give_backend(group: torch.distributed.ProcessGroup, device: torch.device, backend: Any, names: str) -> None:
    """Gives ``group``, which was opened for the host's tensors only, what carries those of ``device``.

    Args:
        group: The group.
        device: The device.
        backend: What another group of the same ranks had for it. torch exchanges none that a group has already.
        names: Of both backends, as ``init_process_group`` takes them.
    """
    kind = torch.distributed.ProcessGroup.BackendType.CUSTOM
    group._register_backend(device, kind, backend)
    group._set_default_backend(kind)  # as if it had been opened with it
    world = distributed_c10d._world
    world.pg_map[group] = (names, world.pg_map[group][1])
    world.pg_backend_config[group] = str(distributed_c10d.BackendConfig(distributed_c10d.Backend(names)))


def set_group_timeout(group: torch.distributed.ProcessGroup, timeout: timedelta) -> None:
    """How long collectives of ``group``, of gloo or NCCL, may take from now on."""
    distributed_c10d._set_pg_timeout(timeout, group)


def forget_failed_opening() -> None:
    """Has the next ``init_process_group`` give its group the name that it has elsewhere, where the last one succeeded.

    Ranks meet under the group's name, a number that counts openings; only ``destroy_process_group`` sets it back, and
    that refuses where nothing was opened.
    """
    distributed_c10d._world.group_count = 0


def update_scale(scaler: torch.amp.GradScaler, found_inf: bool) -> None:
    """What ``GradScaler.update`` does after a step, with the finding given instead of collected from optimizers."""
    device = scaler._device
    if scaler._scale is None:
        scaler._lazy_init_scale_growth_tracker(torch.device(device))
    scale, growth = scaler._check_scale_growth_tracker("update")
    found = torch.full((), float(found_inf), dtype=torch.float32, device=scale.device)
    factors = (scaler.get_growth_factor(), scaler.get_backoff_factor(), scaler.get_growth_interval())
    torch._amp_update_scale_(scale, growth, found, *factors)


def device_of_scaler(scaler: torch.amp.GradScaler) -> str:
    """Type of the device whose gradients it scales."""
    device: str = scaler._device
    return device


class _MetadataUnpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        if name not in _DCP_METADATA.get(module, ()):
            raise pickle.UnpicklingError(f"{module}.{name} does not belong into the metadata of a checkpoint")
        return super().find_class(module, name)


def read_dcp_metadata(content: bytes) -> Metadata:
    """What ``FileSystemReader.read_metadata`` reads, but without running whatever the file says.

    Raises:
        pickle.UnpicklingError: If the content is anything but metadata.
    """
    metadata: Metadata = _MetadataUnpickler(io.BytesIO(content)).load()
    return metadata
