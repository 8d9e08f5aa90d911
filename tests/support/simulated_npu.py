"""An NPU as torch_npu's sources describe it, played on the CPU: the real `devices.npu.Npu`, real tensors, no hardware.

Device memory is a set of storages, which grows as operations on it make more. A `TorchDispatchMode` in the thread that
trains sees every operation, in backward too, and does what a device would do:

- While the device is stopped, an operation on its memory raises FORCE STOP. Views, the host's tensors, and gloo go on.
- The device is asynchronous: what was written since the host has last waited for it may not have been done when it is
  stopped. So it is filled with garbage then, and whoever relies on it ends with other bits.
- A tensor in memory that was hit raises when it is used, until something is copied to it, if only to a part.
  Collectives neither look nor mark.

- A group connects at its first collective, as HCCL does, with the help of a store. Where the ranks of a group do not
  have the same connections, collectives wait for ever.

Two things are other than on a device: operations are done when they return, and ``.cpu()`` is the same tensor.
Whoever breaks a rule of torch_npu's ends at once (`simulated_hccl.broken`).
"""

import ctypes
import sys
import threading
import time
import weakref
from functools import cache
from typing import Any

import lightning as L
import torch
import torch.distributed as dist
from lightning.pytorch.accelerators import CPUAccelerator
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter

from lightning_replica._compat.torch import backend_of, registered_groups
from lightning_replica.devices import gloo, host
from lightning_replica.devices.npu import Npu
from lightning_replica.sharding.state import ShardedState
from tests.support.doubles import overriding
from tests.support.simulated_hccl import HALVES, HCCL, OTHER_HALF, broken, half_of, make_half

ERROR = "operator():build/CMakeFiles/torch_npu.dir/compiler_depend.ts:33 NPU function error: {}, error code is {}\n"
TEXTS = {
    "stop": ERROR.format(" FORCE STOP", 107022),
    "uce": ERROR.format(" UCE ERROR", 507053) + "[ERROR] 2026-11-22-03:00:00 (PID:1, Device:0) ERR00100",
    "unknown uce": ERROR.format("aclrtSynchronizeStream", 507053),
    "ecc": ERROR.format(" HBM MULTI BIT ECC ERROR.time is {}. ", 507054),
    "suspect": ERROR.format(" SUSPECT MEM ERROR", 507055),
    "link": ERROR.format(" HCCS LINK ERROR", 507056),
    "dead link": ERROR.format(" HCCS LINK ERROR", 507056),
    "ub link": " UB LINK ERROR",  # from a queue: without a code
    "remote": ERROR.format(" SUSPECT REMOTE ERROR", 507057),
    "retry": "HCCL OP RETRY FAILED",
    "heartbeat": ERROR.format("aclrtSynchronizeStream", 507010),
    "unsafe": "There is unsafe data in the input tensor.",
    "oom": "NPU out of memory. Tried to allocate 20.00 GiB (NPU 0; 60.96 GiB total capacity)",
}
COPIES = (torch.ops.aten.copy_.default, torch.ops.aten._foreach_copy_.default)
ECC_TIMES = {"now": lambda: str(clock_us()), "old": lambda: "1", "undated": lambda: ""}


def clock_us() -> int:
    return time.monotonic_ns() // 1000


def address(tensor: Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


def garble(storage: Any) -> None:
    """What a kernel that was cut short leaves, or a memory error."""
    if storage is not None and storage.nbytes():
        ctypes.memset(storage.data_ptr(), 0x3F, storage.nbytes())


@cache
def writes(function: Any) -> tuple[bool, tuple[bool, ...]]:
    """Whether an operation only makes views; and for each of its arguments whether that is written to."""
    aliases = [argument.alias_info for argument in function._schema.arguments]
    written = tuple(alias is not None and alias.is_write for alias in aliases)
    return any(alias is not None for alias in aliases) and not any(written), written


def tensors_in(values: Any) -> list[Tensor]:
    return [value for value in tree_iter(values) if isinstance(value, Tensor)]


class Memory(TorchDispatchMode):
    """The device's memory and queue."""

    def __init__(self) -> None:
        super().__init__()
        self.storages: dict[int, Any] = {}  # weak references
        self.unsafe: set[int] = set()
        self.pending: set[int] = set()  # written to, and the host has not waited since
        self.stopped = False

    def place(self, tensor: Tensor) -> None:
        storage = tensor.untyped_storage()
        where = storage.data_ptr()
        if where and where not in self.storages:
            self.storages[where] = weakref.ref(storage)
            weakref.finalize(storage, self.forget, where)

    def forget(self, where: int) -> None:
        self.storages.pop(where, None)
        self.unsafe.discard(where)
        self.pending.discard(where)

    def stop(self) -> None:
        self.stopped = True
        for where in list(self.pending):
            reference = self.storages.get(where)
            garble(reference() if reference is not None else None)
        self.pending.clear()

    def hit(self, tensor: Tensor) -> None:
        garble(tensor.untyped_storage())
        self.unsafe.add(address(tensor))

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        given = tensors_in((args, kwargs))
        used = [tensor for tensor in given if address(tensor) in self.storages]
        views, written = writes(function)
        if not used or views:
            return function(*args, **kwargs)
        self.look_for_a_stop()
        collective = function.namespace == "c10d"
        if collective:
            half_of(dist.ProcessGroup.unbox(next(each for each in args if isinstance(each, torch.ScriptObject)))).work(
                self.look_for_a_stop
            )
        targets = given if collective else tensors_in([a for a, w in zip(args, written, strict=False) if w])
        if not collective:
            self.look(function, used, targets)
        made = function(*args, **kwargs)
        for tensor in [*targets, *tensors_in(made), *tensors_in(kwargs.get("out"))]:
            if function in COPIES and tensor.dtype is torch.uint8 and address(tensor) not in self.storages:
                continue  # to the host, from where shards are sent
            self.place(tensor)
            self.pending.add(address(tensor))
        if function.overloadpacket is torch.ops.aten._local_scalar_dense:
            self.pending.clear()  # the host has the number, and so all that came before is done
        return made

    def look_for_a_stop(self) -> None:
        if self.stopped:
            raise RuntimeError(TEXTS["stop"])

    def look(self, function: Any, used: list[Tensor], targets: list[Tensor]) -> None:
        over = {address(tensor) for tensor in targets} if function in COPIES else set()
        if any(address(tensor) in self.unsafe and address(tensor) not in over for tensor in used):
            raise RuntimeError(TEXTS["unsafe"])
        self.unsafe -= over


class Event:
    def __init__(self, enable_timing: bool = False) -> None:
        self.at: int | None = None

    def record(self, stream: Any = None) -> None:
        self.at = clock_us()

    def recorded_time(self) -> int:
        MODULE.synchronize()
        assert self.at is not None
        return self.at


class Recovery:
    """``torch_npu.npu._recovery``."""

    def check_npu_tensor_is_safe(self, tensor_obj: Tensor) -> bool:
        return address(tensor_obj) not in MEMORY.unsafe

    def update_npu_tensor_to_safe(self, tensor_obj: Tensor) -> None:
        MEMORY.unsafe.discard(address(tensor_obj))


class Module:
    """``torch_npu.npu``: what `devices.npu` uses of it, with torch_npu's signatures."""

    Event = Event

    def __init__(self) -> None:
        self._recovery = Recovery()
        self.answer = 0
        self.link_is_dead = False
        self.threads: set[int] = set()  # that have chosen a device
        self.random = torch.Generator().manual_seed(3)

    def set_device(self, device: Any) -> None:
        self.threads.add(threading.get_ident())

    def synchronize(self, device: Any = None) -> None:
        if MEMORY.stopped:
            raise RuntimeError(TEXTS["stop"])
        MEMORY.pending.clear()

    def empty_cache(self) -> None:
        if MEMORY.stopped:
            broken("empty_cache before restart_device")

    def stop_device(self, device_id: int) -> int:
        if threading.current_thread() is threading.main_thread():
            broken("stop_device in the thread that trains")
        if threading.get_ident() not in self.threads:
            broken("stop_device in a thread that has not called set_device")
        MEMORY.stop()
        for half in HALVES:
            half.settled = False
        return 0

    def check_uce_in_memory(self, device_id: int) -> int:
        if not MEMORY.stopped:
            broken("check_uce_in_memory while the device runs")
        return self.answer

    def restart_device(
        self, device_id: int, rebuild_all_resources: bool = False, disable_tensor_unsafe_check: bool = False
    ) -> None:
        if not MEMORY.stopped:
            broken("restart_device while the device runs")
        if threading.current_thread() is not threading.main_thread():
            broken("restart_device in another thread than the one that trains")
        own = [group for group in registered_groups() if OTHER_HALF in group._device_types]
        if not all(half_of(group).settled for group in own):
            broken("restart_device with connections that neither go on nor are given up")
        MEMORY.stopped, self.answer, self.link_is_dead = False, 0, False

    def get_rng_state(self, device: Any = "npu") -> Tensor:
        return self.random.get_state()

    def set_rng_state(self, new_state: Tensor, device: Any = "npu") -> None:
        self.random.set_state(new_state)

    def default_stream(self, device: Any = None) -> str:
        return "default"

    def set_stream(self, stream: Any) -> None:
        assert stream == "default"


class Distributed:
    """``torch_npu.distributed``: what `devices.npu` uses of it, as it is written there."""

    def reinit_process_group(self, group: Any = None, rebuild_link: bool = True) -> Any:
        if not rebuild_link:
            if not MEMORY.stopped:
                broken("resume_hccl_comm while the device runs")
            if MODULE.link_is_dead:
                raise RuntimeError(TEXTS["link"])
            sys.stderr.write(f"{RESUMED}\n")
            for each in registered_groups():
                if OTHER_HALF in each._device_types:
                    half_of(each).resume_hccl_comm(0)
            return None
        if "hccl" in dist.get_backend(group):
            half_of(group)._delete_tcpstore_key()
            half_of(group).abort_hccl_comm("reinit")
        return group


@overriding()
class SimulatedNpu(Npu):
    """Its tensors are the CPU's, and its collectives gloo's."""

    kind = host.HOST.type

    def __init__(self) -> None:
        self.backend = f"{host.HOST.type}:{gloo.NAME},{OTHER_HALF.type}:{HCCL}"
        super().__init__(0, torch_npu=type("torch_npu", (), {"npu": MODULE, "distributed": Distributed()}))

    def _hccl_of(self, group: Any) -> Any:
        return None if backend_of(group, OTHER_HALF) is None else half_of(group)


RESUMED = "simulated npu: connections go on"
MEMORY, MODULE = Memory(), Module()
_device: list[SimulatedNpu] = []
_module: list[L.LightningModule] = []


@overriding(new=("recovery_device",))
class SimulatedAccelerator(CPUAccelerator):
    """Trains on the simulated device."""

    def recovery_device(self, root_device: torch.device) -> SimulatedNpu:
        if not _device:
            dist.Backend.register_backend(HCCL, make_half, extended_api=True, devices=[OTHER_HALF.type])
            _device.append(SimulatedNpu())
        return _device[0]

    def setup(self, trainer: L.Trainer) -> None:
        super().setup(trainer)
        _module[:] = [trainer.lightning_module]
        for tensor in (*_module[0].parameters(), *_module[0].buffers()):
            MEMORY.place(tensor)
        MEMORY.__enter__()

    def teardown(self) -> None:
        if _module:
            _module.clear()
            MEMORY.__exit__(None, None, None)
        super().teardown()


def fail(kind: str, state: ShardedState) -> None:
    """An error of the device.

    Args:
        kind: "uce 0", "uce 1", "uce 2", "uce 3 <what was hit>", "ecc <when>", or another key of `TEXTS`. A "dead link"
            is one that does not come back.
        state: Whose memory is hit.
    """
    name, _, rest = kind.partition(" ")
    if name == "uce":
        MODULE.answer = int(rest[0])
        if MODULE.answer == 3:
            MEMORY.hit(_named(rest[2:], state))
        raise RuntimeError(TEXTS["uce"])
    if name == "ecc":
        MODULE.answer = 3
        raise RuntimeError(TEXTS["ecc"].format(ECC_TIMES[rest]()))
    MODULE.link_is_dead = kind == "dead link"
    raise (torch.OutOfMemoryError if kind == "oom" else RuntimeError)(TEXTS[kind])


def _named(what: str, state: ShardedState) -> Tensor:
    if what == "buffers":
        return next(iter(_module[0].buffers()))
    if what == "optimizer":
        held = state.optimizers[0].state()[0]
        return max(held.values(), key=lambda tensor: tensor.numel())
    tensor: Tensor = getattr(state.buffers[0], what)
    return tensor
