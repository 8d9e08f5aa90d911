"""Names of torch that are private or were renamed."""

from __future__ import annotations

import contextlib
import functools
import io
import operator
import pickle
import warnings
from collections.abc import Callable
from datetime import timedelta
from enum import Enum
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, Final

import torch
from torch import Tensor
from torch.distributed import distributed_c10d
from torch.optim import Optimizer

from lightning_replica._compat.versions import (
    TORCH_VERSIONS,
    check_version,
    need,
    need_in_instances,
    private_names_of,
)

check_version("torch", TORCH_VERSIONS)
GLOBAL_HOOKS: Final = (
    *("_global_forward_pre_hooks", "_global_forward_hooks", "_global_backward_pre_hooks", "_global_backward_hooks"),
    *("_global_forward_hooks_with_kwargs", "_global_forward_hooks_always_called"),
)
"""Tables of ``torch.nn.modules.module``: hooks of all modules of the process."""

with private_names_of("torch"):
    from torch import _weights_only_unpickler
    from torch.nn.modules.batchnorm import _BatchNorm as _BatchNorm
    from torch.utils import _pytree
    from torch.utils.data.dataloader import _BaseDataLoaderIter as _BaseDataLoaderIter
    from torch.utils.hooks import RemovableHandle

    need(torch.Tensor, "_version", "is_inference")
    need(RemovableHandle, "next_id")
    need(torch.nn.modules.module, *GLOBAL_HOOKS)
    # An instance would import torch._dynamo. That takes a second, which only processes that train should spend.
    need_in_instances(Optimizer, "_optimizer_step_pre_hooks", "_optimizer_step_post_hooks")
    need(torch.autograd, "_profiler_enabled")
    need(torch.amp.GradScaler, "_lazy_init_scale_growth_tracker", "_check_scale_growth_tracker")
    need(_weights_only_unpickler, "_get_allowed_globals")
    if not hasattr(torch.distributed, "set_timeout"):  # from torch 2.14
        need(distributed_c10d, "_set_pg_timeout")
    need(torch.distributed.Work, "exception")

if TYPE_CHECKING:  # the import takes a quarter of a second, which only processes that save should spend
    from torch.distributed.checkpoint.metadata import Metadata

pytree = _pytree
_HOST = "cpu"

# All names that occur in the pickled `.metadata` of PyTorch Distributed Checkpoint.
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


data_version: Callable[[Tensor], int] = operator.attrgetter("_version")
"""Returns a number that changes whenever the tensor is written to."""


def write_count(tensor: Tensor) -> int:
    """Return the `data_version`, or -1 if torch keeps none, as for tensors made in inference mode."""
    return -1 if tensor.is_inference() else data_version(tensor)


def registered_hooks() -> int:
    """Return how many hooks of modules, tensors and optimizers this process has registered."""
    return RemovableHandle.next_id


def storage_of(tensor: Tensor) -> int:
    """Return the address of the memory that a tensor lies in, whole or in part; 0 if it has none of its own."""
    if tensor.layout is not torch.strided or tensor.is_meta or is_wrapper(tensor):
        return 0
    return tensor.untyped_storage().data_ptr()


def is_wrapper(tensor: Tensor) -> bool:
    """Return whether a tensor's class stands in front of other tensors, so that its own memory has no meaning."""
    return type(tensor).__torch_dispatch__ is not Tensor.__torch_dispatch__


def of_base_class(tensor: Tensor) -> Tensor:
    """Return a tensor in the same memory, without its graph and its own class."""
    with torch._C.DisableTorchFunctionSubclass():
        return Tensor.detach(tensor)


def of_class(tensor: Tensor, cls: type[Tensor]) -> Tensor:
    """Return a tensor of a subclass in the same memory, without calling any code of the subclass."""
    with torch._C.DisableTorchFunctionSubclass():
        found: Tensor = Tensor.as_subclass(tensor, cls)
        return found


def step_hooks_of(optimizer: torch.optim.Optimizer) -> list[Any]:
    """Return the functions that an optimizer calls before and after each step."""
    return [*optimizer._optimizer_step_pre_hooks.values(), *optimizer._optimizer_step_post_hooks.values()]


def mark_stepped(optimizer: Optimizer) -> None:
    """Prevent a scheduler's warning that it steps before the optimizer: a replacement has not made earlier steps."""
    optimizer._opt_called = True  # type: ignore[attr-defined]


def as_bytes(tensor: Tensor) -> memoryview:
    """Return the memory of a contiguous CPU tensor."""
    return memoryview(tensor.view(torch.uint8).numpy())  # type: ignore[arg-type]


def registered_groups(backend: str | None = None) -> list[torch.distributed.ProcessGroup]:
    """Return all process groups that this process has opened and not destroyed, including the user's own.

    Args:
        backend: Return only groups that use one of these backends: "gloo", or "cpu:gloo,cuda:nccl" for any of two.
    """
    groups = list(distributed_c10d._world.pg_map.items())
    return [group for group, (name, _) in groups if backend is None or _backends(name) & _backends(backend)]


def _backends(names: str) -> set[str]:
    return {name.rpartition(":")[2] for name in names.split(",")}


def failure_of(work: torch.distributed.Work) -> BaseException | None:
    """Return the error of a collective that has ended; None if it succeeded.

    torch calls ``exception`` deprecated, but offers nothing else where ``wait`` only orders work, as NCCL's does
    (pytorch issue 46291).
    """
    try:
        failure: BaseException | None = work.exception()
    except TypeError:  # before torch 2.13, it cannot return what it has, not even that there is no error
        try:
            work.wait()  # returns at once, as the work has ended
        except RuntimeError as error:
            return error
        return None
    return failure


def all_gather_single(
    into: torch.Tensor, own: torch.Tensor, group: torch.distributed.ProcessGroup
) -> torch.distributed.Work | None:
    """Begin to gather equal parts into one tensor; torch before 2.13 knows this under another name."""
    gather = getattr(torch.distributed, "all_gather_single", None) or torch.distributed.all_gather_into_tensor
    work: torch.distributed.Work | None = gather(into, own, group=group, async_op=True)
    return work


def backend_of(group: torch.distributed.ProcessGroup, device: torch.device) -> Any | None:
    """Return the backend of ``group`` that carries tensors of ``device``; None if it has none."""
    kinds = [other.type for other in group._device_types]
    return group._get_backend(device) if device.type in kinds else None


def backend_on_host(backend: str) -> tuple[str, torch.device]:
    """Split the backend argument of ``init_process_group`` into the host's part and the other device.

    Args:
        backend: One name for all devices, or "cpu:gloo,npu:hccl".

    Returns:
        The argument for a group that carries the host's tensors only, "cpu:gloo"; and the other device, or the host if
        there is none.
    """
    parts = dict(part.split(":") for part in backend.split(",")) if ":" in backend else {_HOST: backend}
    other = next((kind for kind in parts if kind != _HOST), _HOST)
    return f"{_HOST}:{parts[_HOST]}", torch.device(other)


def give_backend(group: torch.distributed.ProcessGroup, device: torch.device, backend: Any, names: str) -> None:
    """Give ``group``, which was opened for the host's tensors only, a backend for tensors of ``device``.

    Args:
        group: The group. It has no backend for ``device`` yet: torch never replaces a backend that a group has.
        device: The device.
        backend: The backend for ``device`` of another group of the same ranks.
        names: Names of both backends, as ``init_process_group`` takes them.
    """
    kind = torch.distributed.ProcessGroup.BackendType.CUSTOM
    group._register_backend(device, kind, backend)
    group._set_default_backend(kind)  # as if the group had been opened with this backend
    world = distributed_c10d._world
    world.pg_map[group] = (names, world.pg_map[group][1])
    world.pg_backend_config[group] = str(distributed_c10d.BackendConfig(distributed_c10d.Backend(names)))


def set_group_timeout(group: torch.distributed.ProcessGroup, timeout: timedelta) -> None:
    """Set the time-out of collectives of ``group``, of gloo or NCCL, from now on."""
    public = getattr(torch.distributed, "set_timeout", None)  # from torch 2.14
    (public or distributed_c10d._set_pg_timeout)(timeout, group)


def forget_failed_opening() -> None:
    """Reset torch's count of groups after a failed ``init_process_group``, so that group names agree on all ranks.

    Ranks find each other under the group's name, which is a count of openings. Where the opening failed, only
    ``destroy_process_group`` would reset the count, but it raises an error because no group is open.
    """
    distributed_c10d._world.group_count = 0


def update_scale(scaler: torch.amp.GradScaler, found_inf: bool) -> None:
    """Do what ``GradScaler.update`` does after a step, with ``found_inf`` as given, not collected from optimizers."""
    device = torch.device(scaler._device)
    if scaler._scale is None:
        scaler._lazy_init_scale_growth_tracker(device)
    found = torch.full((), float(found_inf), dtype=torch.float32, device=device)
    scaler._per_optimizer_states[0]["found_inf_per_device"] = {device: found}
    scaler.update()  # perhaps a subclass's, with rules of its own


def found_inf(scaler: torch.amp.GradScaler) -> bool:
    """Return whether a gradient was infinite or NaN since the last update, for a subclass's ``update``; forget it."""
    states = scaler._per_optimizer_states
    found = any(bool(each) for state in states.values() for each in state["found_inf_per_device"].values())
    states.clear()
    return found


def set_scale(scaler: torch.amp.GradScaler, scale: float) -> None:
    """Set the loss scale."""
    if scaler._scale is None:
        scaler._lazy_init_scale_growth_tracker(torch.device(scaler._device))
    scaler._check_scale_growth_tracker("update")[0].fill_(scale)


def device_of_scaler(scaler: torch.amp.GradScaler) -> str:
    """Return the type of the device whose gradients ``scaler`` scales."""
    device: str = scaler._device
    return device


class _Unknown:
    """Stands for an object of a class that is not known to be harmless."""

    def __init__(self, *args: Any, **options: Any) -> None: ...

    def __setstate__(self, state: Any) -> None: ...


def _member_of(kind: Any, name: Any) -> Any:
    """Return a member of an enum: Python 3.11.0 to 3.11.3 writes one as a call of `getattr`, not by its value."""
    if not (isinstance(kind, type) and issubclass(kind, Enum) and name in kind.__members__):
        asked = f"getattr({kind!r:.100}, {name!r:.100})"
        raise pickle.UnpicklingError(f"{asked} does not belong in the metadata of a checkpoint")
    return kind[name]


class _MetadataUnpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        if (module, name) == ("builtins", "getattr"):
            return _member_of
        if name not in _DCP_METADATA.get(module, ()):
            raise pickle.UnpicklingError(f"{module}.{name} does not belong in the metadata of a checkpoint")
        return super().find_class(module, name)


def _member_or_unknown(kind: Any, name: Any) -> Any:
    return _Unknown() if kind is _Unknown else _member_of(kind, name)


class _ForeignMetadataUnpickler(_MetadataUnpickler):
    def find_class(self, module: str, name: str) -> Any:
        if (module, name) == ("builtins", "getattr"):
            return _member_or_unknown
        known = name in _DCP_METADATA.get(module, ())
        return super().find_class(module, name) if known else _Unknown


def read_dcp_metadata(content: bytes, foreign: bool = False) -> Metadata:
    """Return what ``FileSystemReader.read_metadata`` returns, but without running code that the file names.

    Args:
        content: The content of the file.
        foreign: Whether another program wrote it, which may have added objects. Stand-ins take their place.

    Raises:
        pickle.UnpicklingError: If the content is anything other than metadata.
    """
    unpickler = _ForeignMetadataUnpickler if foreign else _MetadataUnpickler
    metadata: Metadata = unpickler(io.BytesIO(content)).load()
    return metadata


class _KnownUnpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        return _weights_only_unpickler._get_allowed_globals().get(f"{module}.{name}", _Unknown)


def load_known(content: bytes) -> Any:
    """Return what ``torch.save`` wrote, with stand-ins for all that ``weights_only=True`` would refuse.

    No code runs that the content names.
    """
    pickled: Any = SimpleNamespace(Unpickler=_KnownUnpickler, __name__="known")
    return torch.load(io.BytesIO(content), map_location=_HOST, pickle_module=pickled, weights_only=False)


def ignore_warnings_of_dcp() -> None:
    """Ignore what PyTorch Distributed Checkpoint of torch 2.9 to 2.12 warns of itself; as an error, nothing is saved.

    This adds to the filters and restores none: a thread may save while the main thread has filters of its own.
    """
    warnings.filterwarnings("ignore", "TypedStorage is deprecated", UserWarning)


def is_profiled() -> bool:
    """Return whether torch's profiler is on in this thread."""
    enabled: bool = torch.autograd._profiler_enabled()
    return enabled


def rendezvous_config(given: str) -> dict[str, str]:
    """Return what torchrun's ``--rdzv-conf`` says.

    Raises:
        ValueError: If it is not of the form ``name=value,...``.
    """
    from torch.distributed.elastic.rendezvous.utils import _parse_rendezvous_config

    return _parse_rendezvous_config(given)


def unset_default_device() -> None:
    """Let torch choose the device of new tensors, as if none had been set.

    ``set_default_device(None)`` leaves an entry behind that torch 2.9 cannot read, neither for us nor for itself.
    """
    torch.set_default_device(None)
    context = getattr(torch, "_GLOBAL_DEVICE_CONTEXT", None)
    if context is not None and getattr(context, "device_context", context) is None:
        del context.device_context


def float32_precision() -> str:
    """Return the precision of products in float32, by torch's older interface.

    Raises:
        RuntimeError: If the script has set it by the newer one, in a way that the older one cannot describe.
    """
    _hear_of_older_interface()
    return torch.get_float32_matmul_precision()


@functools.cache
def _hear_of_older_interface() -> None:
    """Let torch 2.9 warn of its older interface now, unheard: it does so once in a process."""
    with warnings.catch_warnings(), contextlib.suppress(RuntimeError):
        warnings.simplefilter("ignore", UserWarning)
        torch.get_float32_matmul_precision()
