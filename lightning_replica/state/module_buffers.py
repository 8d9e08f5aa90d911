"""Keeps the module's buffers, such as BatchNorm's statistics, the same on all ranks after every step, as DDP does."""

import weakref
from collections.abc import Callable, Iterable, Mapping
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn

from lightning_replica._compat.torch import data_version
from lightning_replica._compat.tree import Tree
from lightning_replica.core.ranges import ranged
from lightning_replica.core.works import Work
from lightning_replica.devices.host import same_bits

# Buffers of up to this many elements are compared by content: BatchNorm's kernels write to its statistics without
# raising their version (tests/trainer/test_ddp.py, images_with_batch_norm). Larger buffers are masks and tables.
_SMALL = 1 << 16


class _Mark(NamedTuple):
    """A buffer as it was, by weak reference, because a new buffer may get the ``id`` of one that is gone."""

    buffer: "weakref.ref[Tensor]"
    version: int
    content: Tensor | None


class ChangedBuffers:
    """Finds the buffers of a module that have been written to or replaced since the last `settle`."""

    def __init__(self) -> None:
        self._marks: dict[str, _Mark] = {}

    def among(self, buffers: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Return those of ``buffers``, which must be all buffers of the module, that have changed since `settle`."""
        return {name: buffer for name, buffer in buffers.items() if self._has_changed(name, buffer)}

    def settle(self, changed: Mapping[str, Tensor]) -> None:
        """Count the present contents of ``changed`` as unchanged."""
        for name, buffer in changed.items():
            content = _content(buffer).clone() if buffer.numel() <= _SMALL else None
            self._marks[name] = _Mark(weakref.ref(buffer), data_version(buffer), content)

    def _has_changed(self, name: str, buffer: Tensor) -> bool:
        known = self._marks.get(name)
        if known is None or known.buffer() is not buffer or known.version != data_version(buffer):
            return True
        return known.content is not None and not same_bits(known.content, _content(buffer))


class BufferSync:
    """Gives one rank's buffers to all ranks of a group, before the snapshot of a step's tail is taken.

    DDP does so at the start of the next forward pass. The effect on every forward pass that follows is the same.
    Buffers that no rank has written to are not sent.

    Args:
        module: The module.
        wait: Waits for the collective on a tensor.
    """

    def __init__(self, module: nn.Module, wait: Callable[[Work, Tensor], None]) -> None:
        self._module, self._wait = module, wait
        self._tree: Tree | None = None
        self._changes = ChangedBuffers()

    @ranged("module_buffers")
    def sync(self, group: dist.ProcessGroup, source: int = 0) -> None:
        """Broadcast the buffers that have changed on any rank. Collective over ``group``.

        Args:
            group: The ranks.
            source: The rank in the group whose buffers all others get.
        """
        self._tree = Tree.of(self._module, self._tree)
        buffers = self._tree.buffers
        if not buffers:
            return
        changed = self._changes.among(buffers)
        flags = torch.tensor([name in changed for name in buffers], dtype=torch.uint8)
        self._wait(dist.all_reduce(flags, op=dist.ReduceOp.MAX, group=group, async_op=True), flags)
        agreed = {name: buffers[name] for name, flag in zip(buffers, flags.tolist(), strict=True) if flag}
        with torch.no_grad():
            for kind in _by_kind(agreed.values()):
                self._broadcast(kind, group, source)
        self._changes.settle(agreed)

    def forget(self) -> None:
        """Count all buffers as changed; called after a fault."""
        self._changes = ChangedBuffers()

    def _broadcast(self, buffers: list[Tensor], group: dist.ProcessGroup, source: int) -> None:
        flat = torch.cat([buffer.detach().reshape(-1) for buffer in buffers])
        self._wait(dist.broadcast(flat, group=group, group_src=source, async_op=True), flat)
        if group.rank() != source:
            for buffer, part in zip(buffers, flat.split([b.numel() for b in buffers]), strict=True):
                buffer.copy_(part.view(buffer.shape))


class BufferCopies:
    """Copies of a module's buffers, made again only for the buffers that have changed."""

    def __init__(self) -> None:
        self._changes = ChangedBuffers()
        self._copies: dict[str, Tensor] = {}

    def take(self, buffers: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Return a copy of each of ``buffers``, which must be all of the module's; nobody may write to the copies."""
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
