"""Ascend NPUs as a device. Gloo carries the host's tensors, HCCL the device's.

All statements about torch_npu rest on its sources, and on tests/devices/test_torch_npu_contract.py, which compares
`npu_contract` with them. Nothing has run on an NPU yet.

[Note: stopping]
A kernel of HCCL that waits for a lost rank waits long, and only stopping the device ends it. Another thread must stop
it, because the training thread may be waiting for that very kernel. The device drops the work that it has not begun.
The next operation of the training thread raises "FORCE STOP".

[Note: the fence]
A stop can interrupt an update. As all ranks are stopped at once, that could happen to every holder of a shard. So a
device is not stopped while the training thread holds the fence. Before the thread takes the fence, it waits until the
device has done all earlier work, in which other ranks may take part. The work inside needs no other rank. The thread
releases the fence when the device has done that work. Copies to roll back to are made inside for the same reason.

[Note: memory]
`check_uce_in_memory` reports what a memory error has hit. It marks the tensors in such memory, and using a marked
tensor raises an error. But writing to a part of a tensor removes the mark of the whole tensor, and collectives neither
check marks nor remove them. So the marks are read only once; from then on, recovery itself keeps track of the tensors
that must come from a peer. An error that only a checksum has found (ECC) marks nothing: the process gives up its
memory. Work that was done before the fence was last entered is not in doubt if the error is younger than that. An older
error may be in data that other ranks have received.

[Note: connections]
A group has two halves. An abort closes gloo's half for good. The stop has ended HCCL's kernels already, so HCCL's half
is left alone until the ranks have agreed. Then it is either resumed, in the groups of the next generation, or given up
before the device restarts. The ranks first compare which groups are connected (`Survived.links`): HCCL connects at a
group's first collective. If only some ranks had completed that, the next collective would wait for ever.
"""

import gc
import importlib
import logging
import re
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from lightning_replica._compat.torch import backend_of
from lightning_replica.devices import gloo, host
from lightning_replica.devices.exceptions import first_line, with_causes
from lightning_replica.devices.interface import DeviceFault, Level, Survived
from lightning_replica.devices.npu_contract import BACKEND, DEVICE_TYPE, ERROR_CODES

log = logging.getLogger(__name__)

_LEVELS: dict[int, Level] = {
    107020: "lost",  # a task that does not end
    107022: "outside",  # the device was stopped
    507053: "memory",
    507054: "memory",
    507055: "lost",  # a memory error at an unknown place
    507056: "retry",
    507057: "outside",
    507904: "retry",
}
_UCE, _ECC = 507053, 507054
_STICKY = range(507000, 508000)  # errors of the runtime; wrong arguments of a call have other numbers
_CODE = re.compile(r"error code is (\d+)")
_TIME = re.compile(r"time is (\d+)")
_UNSAFE = "There is unsafe data in the input tensor."
_OTHER_PROCESS = "in DataLoader worker process"

# An update or a copy of the shard takes far less time.
_PATIENCE_S = 10.0


class Fence:
    """A lock that keeps the device from being stopped. See [Note: the fence].

    Args:
        npu: ``torch_npu.npu``.
        index: Index of the device.

    Attributes:
        stopped: Whether the device is stopped.
        entered_us: When the fence was last entered, in microseconds of the device's clock; None if it never was.
    """

    def __init__(self, npu: Any, index: int) -> None:
        self._npu, self._index = npu, index
        self._lock = threading.RLock()
        self.stopped = False
        self.entered_us: int | None = None

    def __enter__(self) -> None:
        self._npu.synchronize(self._index)
        self._lock.acquire()
        try:
            if self.stopped:
                raise RuntimeError("FORCE STOP: the device has just been stopped")
            event = self._npu.Event(enable_timing=True)
            event.record()
            self.entered_us = event.recorded_time()
        except BaseException:
            self._lock.release()
            raise

    def __exit__(self, failed: type[BaseException] | None, *_: object) -> None:
        try:
            if failed is None:
                self._npu.synchronize(self._index)
        finally:
            self._lock.release()

    @contextmanager
    def shut(self) -> Iterator[None]:
        """Keep other threads out of the fence; a thread inside gets some time to finish and leave."""
        alone = self._lock.acquire(timeout=_PATIENCE_S)
        if not alone:
            log.warning("an update has not ended within %g s; the device is stopped anyway", _PATIENCE_S)
        try:
            yield
        finally:
            if alone:
                self._lock.release()


class Npu:
    """`Device` for ranks that train on an Ascend NPU.

    Args:
        index: Index of the NPU among those that this process sees.
        torch_npu: The package torch_npu; imported if it is not given.
    """

    kind = DEVICE_TYPE
    backend = f"{host.HOST.type}:{gloo.NAME},{DEVICE_TYPE}:{BACKEND}"
    is_host, stops = False, True

    def __init__(self, index: int, torch_npu: Any = None) -> None:
        self._torch_npu = importlib.import_module("torch_npu") if torch_npu is None else torch_npu
        self._npu = self._torch_npu.npu
        self._index, self._device = index, torch.device(self.kind, index)
        self.fence = Fence(self._npu, index)
        self._ecc_us: int | None = None  # when the last ECC error occurred; -1 if that is unknown; None: no error
        self._hit: dict[str, None] = {}  # names of tensors hit since the last restart: `clean` may be called twice
        self._waiting: dict[ProcessGroup, None] = {}  # groups whose HCCL half is neither resumed nor given up

    def stop(self) -> None:
        """End everything that the device runs; see [Note: stopping]."""
        with self.fence.shut():
            try:
                self._npu.set_device(self._index)  # this thread may never have used it
                if self._npu.stop_device(self._index) != 0:
                    log.warning("%s was stopped, but reports that this failed", self._device)
            except RuntimeError as error:
                # After the stop, torch_npu walks over its groups, which the other thread may be opening or closing.
                log.warning("stopping %s: %s", self._device, first_line(error))
            self.fence.stopped = True

    def clean(self, held: Mapping[str, Tensor]) -> Survived:
        """Find out which memory was hit and which groups are connected; see [Note: memory], [Note: connections]."""
        survived = self._survived(held)
        if survived.level in ("nothing", "spoiled"):
            return survived  # it does not matter any more which groups are connected
        return replace(survived, links=tuple(map(self._is_connected, self._waiting)))

    def _survived(self, held: Mapping[str, Tensor]) -> Survived:
        try:
            answer = self._npu.check_uce_in_memory(self._index)
            if answer == 3 and gc.collect():  # memory that only a traceback still held counts as temporary now
                answer = self._npu.check_uce_in_memory(self._index)
        except RuntimeError as error:
            log.warning("%s cannot tell which memory it has lost: %s", self._device, first_line(error))
            return Survived("nothing")
        if answer == 3:
            return self._without_persistent(held)
        if answer == 1:
            return Survived("nothing")  # the memory is not torch's
        return Survived("redo" if answer == 2 else "all")

    def _without_persistent(self, held: Mapping[str, Tensor]) -> Survived:
        if self._ecc_us is not None:
            since = self.fence.entered_us
            return Survived("nothing" if since is not None and self._ecc_us >= since else "spoiled")
        marks = self._npu._recovery
        for name, tensor in held.items():
            if tensor.device.type == self.kind and not marks.check_npu_tensor_is_safe(tensor):
                marks.update_npu_tensor_to_safe(tensor)
                self._hit[name] = None
        if not self._hit:
            return Survived("nothing")  # what was hit is not among ``held``, so no peer can send it
        return Survived("rebuild", tuple(self._hit))

    def restart(self) -> None:
        """Restart a stopped device; this also repairs memory that was hit."""
        if not self.fence.stopped:
            return
        with self.fence.shut():
            self._give_up(list(self._waiting))
            self._npu.restart_device(self._index)
            self.fence.stopped = False
        self._ecc_us, self._hit = None, {}
        self._npu.empty_cache()
        # Autograd has its own threads, and each thread has its own current stream.
        one = torch.ones(1, device=self._device, requires_grad=True)
        _OnDefaultStream.apply(one, self._npu).backward()  # type: ignore[no-untyped-call]

    def abort_groups(self, groups: Sequence[ProcessGroup]) -> None:
        """Abort gloo's half of ``groups``, and HCCL's half unless the device is stopped. See [Note: connections]."""
        for group in groups:
            gloo.abort_group(group)
        with_own = [group for group in groups if self._hccl_of(group) is not None]
        self._waiting.update(dict.fromkeys(with_own))
        if not self.fence.stopped:
            self._give_up(with_own)

    def _give_up(self, groups: Sequence[ProcessGroup]) -> None:
        for group in groups:
            self._hccl_of(group).abort_hccl_comm("lightning_replica")  # `group.abort` does nothing here
            self._waiting.pop(group, None)

    def _hccl_of(self, group: ProcessGroup) -> Any:
        own = backend_of(group, self._device)
        return None if own is None or own.name() == gloo.NAME else own

    def _is_connected(self, group: ProcessGroup) -> bool:
        # The parameter is called "rankid", but only serves to warn if a rank uses a device with another number.
        return bool(self._hccl_of(group).get_hccl_comm_name(self._index, init_comm=False))

    def connect(self, group: ProcessGroup) -> Callable[[], bool]:
        """Do nothing: HCCL connects in the first collective."""
        return lambda: True

    def resume_groups(self, groups: Sequence[ProcessGroup]) -> bool:
        """Keep the connections that exist; the other groups connect anew, as if they had never begun to."""
        self._give_up([group for group in self._waiting if group not in groups])
        try:
            for group in [group for group in self._waiting if not self._is_connected(group)]:
                self._torch_npu.distributed.reinit_process_group(group=group, rebuild_link=True)
            self._torch_npu.distributed.reinit_process_group(group=None, rebuild_link=False)  # None: all groups
        except RuntimeError as error:
            log.warning("%s cannot resume its connections: %s", self._device, first_line(error))
            return False
        self._waiting.clear()
        return True

    def classify(self, error: BaseException) -> DeviceFault | None:
        """Classify ``error``, or one of its causes, by the number in its message, or else by its text."""
        for each in with_causes(error):
            fault = self._read(each)
            if fault is not None:
                return fault
            if gloo.is_collective_failure(each):
                return DeviceFault("outside", first_line(each))
        return None

    def _read(self, error: BaseException) -> DeviceFault | None:
        text = str(error)
        if isinstance(error, torch.OutOfMemoryError):
            return DeviceFault("exhausted", _text_of(error))
        if _OTHER_PROCESS in text:
            return None
        found = _CODE.search(text)
        named = next((known.code for known in ERROR_CODES if known.text in text), None)
        code = int(found[1]) if found else named
        if code is None:
            return DeviceFault("lost", _text_of(error)) if _UNSAFE in text else None
        level = _LEVELS.get(code, "lost" if code in _STICKY else None)
        if code == _UCE and named != _UCE:
            level = "lost"  # no address is known, so it is unknown what was hit
        if code == _ECC:
            time = _TIME.search(text)
            self._ecc_us = -1 if time is None else int(time[1])
        return None if level is None else DeviceFault(level, _text_of(error), code)

    def rng_state(self) -> bytes:
        """Return the state of the host's generators and the device's."""
        own: bytes = self._npu.get_rng_state(self._device).numpy().tobytes()
        return host.rng_state() + own

    def set_rng_state(self, state: bytes) -> None:
        """Restore what `rng_state` returned."""
        host.set_rng_state(state)
        own = host.added_to(state)
        if own:
            self._npu.set_rng_state(torch.frombuffer(bytearray(own), dtype=torch.uint8), self._device)


def _text_of(error: BaseException) -> str:
    """Return the first line of a message, without the place in torch_npu's code."""
    return first_line(error).rpartition("NPU function error: ")[2].strip()


class _OnDefaultStream(torch.autograd.Function):
    """Makes the threads of the forward pass and of the backward pass use the default stream."""

    @staticmethod
    def forward(ctx: Any, tensor: Tensor, npu: Any) -> Tensor:
        """Set the default stream in the calling thread."""
        ctx.npu = npu
        npu.set_stream(npu.default_stream())
        return tensor.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        """Set the default stream in autograd's thread."""
        ctx.npu.set_stream(ctx.npu.default_stream())
        return gradients[0], None
