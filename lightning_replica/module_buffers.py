"""Buffers of the module, BatchNorm's statistics among them: the same on all ranks after every step, as under DDP."""

import weakref
from collections.abc import Callable, Iterable, Mapping
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn

from lightning_replica._compat.torch import data_version
from lightning_replica._compat.tree import Tree
from lightning_replica.devices.host import same_bits
from lightning_replica.works import Work

# Up to this many elements a buffer is compared by content: BatchNorm's kernels write to its statistics without
# raising their version (tests/strategy/test_ddp.py, images_with_batch_norm). Larger ones are masks and tables.
_SMALL = 1 << 16


class _Mark(NamedTuple):
    """A buffer as it was: a weak reference, because another one may get the ``id`` of one that is gone."""

    buffer: "weakref.ref[Tensor]"
    version: int
    content: Tensor | None


class ChangedBuffers:
    """Tells which buffers of a module have been written to or replaced since it was last asked."""

    def __init__(self) -> None:
        self._marks: dict[str, _Mark] = {}

    def among(self, buffers: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Those of ``buffers``, all that there are, that have changed since `settle`."""
        return {name: buffer for name, buffer in buffers.items() if self._has_changed(name, buffer)}

    def settle(self, changed: Mapping[str, Tensor]) -> None:
        """What is there now of ``changed`` counts as unchanged."""
        for name, buffer in changed.items():
            content = _content(buffer).clone() if buffer.numel() <= _SMALL else None
            self._marks[name] = _Mark(weakref.ref(buffer), data_version(buffer), content)

    def _has_changed(self, name: str, buffer: Tensor) -> bool:
        known = self._marks.get(name)
        if known is None or known.buffer() is not buffer or known.version != data_version(buffer):
            return True
        return known.content is not None and not same_bits(known.content, _content(buffer))


class BufferSync:
    """Gives every rank rank 0's buffers, once a step, before the snapshot of its tail is taken.

    DDP does so at the start of the next forward pass, which comes to the same for every forward pass that follows.
    Buffers that no rank has written to are not sent.

    Args:
        module: The module.
        wait: Waits for the collective on a tensor.
    """

    def __init__(self, module: nn.Module, wait: Callable[[Work, Tensor], None]) -> None:
        self._module, self._wait = module, wait
        self._changes = ChangedBuffers()

    def sync(self, group: dist.ProcessGroup) -> None:
        """Broadcasts what has changed on any rank. Collective over ``group``."""
        buffers = Tree.of(self._module).buffers
        if not buffers:
            return
        changed = self._changes.among(buffers)
        flags = torch.tensor([name in changed for name in buffers], dtype=torch.uint8)
        self._wait(dist.all_reduce(flags, op=dist.ReduceOp.MAX, group=group, async_op=True), flags)
        agreed = {name: buffers[name] for name, flag in zip(buffers, flags.tolist(), strict=True) if flag}
        with torch.no_grad():
            for kind in _by_kind(agreed.values()):
                self._broadcast(kind, group)
        self._changes.settle(agreed)

    def forget(self) -> None:
        """After a fault: everything counts as changed."""
        self._changes = ChangedBuffers()

    def _broadcast(self, buffers: list[Tensor], group: dist.ProcessGroup) -> None:
        flat = torch.cat([buffer.detach().reshape(-1) for buffer in buffers])
        self._wait(dist.broadcast(flat, 0, group=group, async_op=True), flat)
        if group.rank() != 0:
            for buffer, part in zip(buffers, flat.split([b.numel() for b in buffers]), strict=True):
                buffer.copy_(part.view(buffer.shape))


class BufferCopies:
    """Copies of a module's buffers, made anew only for those that have changed."""

    def __init__(self) -> None:
        self._changes = ChangedBuffers()
        self._copies: dict[str, Tensor] = {}

    def take(self, buffers: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """A copy of each of ``buffers``, all that there are; not to be written to."""
        changed = self._changes.among(buffers)
        self._copies.update({name: buffer.detach().clone() for name, buffer in changed.items()})
        self._changes.settle(changed)
        return {name: self._copies[name] for name in buffers}


def _content(buffer: Tensor) -> Tensor:
    return buffer.detach().contiguous()


def _by_kind(buffers: Iterable[Tensor]) -> list[list[Tensor]]:
    kinds: dict[tuple[torch.dtype, torch.device], list[Tensor]] = {}
    for buffer in buffers:
        if buffer.numel():
            kinds.setdefault((buffer.dtype, buffer.device), []).append(buffer)
    return list(kinds.values())
