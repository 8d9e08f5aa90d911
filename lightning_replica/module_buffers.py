"""Buffers of the module, BatchNorm's statistics among them: the same on all ranks after every step, as under DDP."""

from collections.abc import Callable, Iterable, Mapping

import torch
import torch.distributed as dist
from torch import Tensor, nn

from lightning_replica._compat.torch import data_version, same_bits
from lightning_replica.works import Work

# Up to this many elements a buffer is compared by content: BatchNorm's kernels write to its statistics without
# raising their version (tests/strategy/test_ddp.py, images_with_batch_norm). Larger ones are masks and tables.
_SMALL = 1 << 16


class ChangedBuffers:
    """Tells which buffers of a module have been written to or replaced since it was last asked.

    Args:
        module: The module.
    """

    def __init__(self, module: nn.Module) -> None:
        self._module = module
        self._marks: dict[str, tuple[int, int, Tensor | None]] = {}

    def names(self) -> list[str]:
        """All buffers, in order of registration."""
        return [name for name, _ in self._module.named_buffers()]

    def changed(self) -> dict[str, Tensor]:
        """Buffers that have changed since `settle`."""
        return {name: buffer for name, buffer in self._module.named_buffers() if self._has_changed(name, buffer)}

    def settle(self, changed: Mapping[str, Tensor]) -> None:
        """What is there now of ``changed`` counts as unchanged."""
        for name, buffer in changed.items():
            content = _content(buffer).clone() if buffer.numel() <= _SMALL else None
            self._marks[name] = (id(buffer), data_version(buffer), content)

    def _has_changed(self, name: str, buffer: Tensor) -> bool:
        known = self._marks.get(name)
        if known is None or known[:2] != (id(buffer), data_version(buffer)):
            return True
        return known[2] is not None and not same_bits(known[2], _content(buffer))


class BufferSync:
    """Gives every rank rank 0's buffers, once a step, before the snapshot of its tail is taken.

    DDP does so at the start of the next forward pass, which comes to the same for every forward pass that follows.
    Buffers that no rank has written to are not sent.

    Args:
        module: The module.
        wait: Waits for a collective.
    """

    def __init__(self, module: nn.Module, wait: Callable[[Work], None]) -> None:
        self._module, self._wait = module, wait
        self._changes = ChangedBuffers(module)

    def sync(self, group: dist.ProcessGroup) -> None:
        """Broadcasts what has changed on any rank. Collective over ``group``."""
        names = self._changes.names()
        if not names:
            return
        changed = self._changes.changed()
        flags = torch.tensor([name in changed for name in names], dtype=torch.uint8)
        self._wait(dist.all_reduce(flags, op=dist.ReduceOp.MAX, group=group, async_op=True))
        buffers = dict(self._module.named_buffers())
        agreed = {name: buffers[name] for name, flag in zip(names, flags.tolist(), strict=True) if flag}
        with torch.no_grad():
            for kind in _by_kind(agreed.values()):
                self._broadcast(kind, group)
        self._changes.settle(agreed)

    def forget(self) -> None:
        """After a fault: everything counts as changed."""
        self._changes = ChangedBuffers(self._module)

    def _broadcast(self, buffers: list[Tensor], group: dist.ProcessGroup) -> None:
        flat = torch.cat([buffer.detach().reshape(-1) for buffer in buffers])
        self._wait(dist.broadcast(flat, 0, group=group, async_op=True))
        if group.rank() != 0:
            for buffer, part in zip(buffers, flat.split([b.numel() for b in buffers]), strict=True):
                buffer.copy_(part.view(buffer.shape))


class BufferCopies:
    """Copies of a module's buffers, made anew only for those that have changed.

    Args:
        module: The module.
    """

    def __init__(self, module: nn.Module) -> None:
        self._changes = ChangedBuffers(module)
        self._copies: dict[str, Tensor] = {}

    def take(self) -> dict[str, Tensor]:
        """A copy of every buffer by name; not to be written to."""
        changed = self._changes.changed()
        self._copies.update({name: buffer.detach().clone() for name, buffer in changed.items()})
        self._changes.settle(changed)
        return {name: self._copies[name] for name in self._changes.names()}


def _content(buffer: Tensor) -> Tensor:
    return buffer.detach().contiguous()


def _by_kind(buffers: Iterable[Tensor]) -> list[list[Tensor]]:
    kinds: dict[tuple[torch.dtype, torch.device], list[Tensor]] = {}
    for buffer in buffers:
        if buffer.numel():
            kinds.setdefault((buffer.dtype, buffer.device), []).append(buffer)
    return list(kinds.values())
