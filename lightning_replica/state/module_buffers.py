"""A module's buffers, such as BatchNorm's statistics: copied in snapshots, the same on all ranks after every step."""

import sys
from collections.abc import Callable, Iterable, Mapping

import torch
import torch.distributed as dist
from torch import Tensor, nn

from lightning_replica._compat.tree import Tree
from lightning_replica.core.inexact import Report
from lightning_replica.core.ranges import ranged
from lightning_replica.core.works import Work
from lightning_replica.state.objects.contents import Contents, Held


class BufferCopies:
    """Copies of a module's buffers, made again only for the buffers that have changed.

    Args:
        report: Called with a write that is found late.
    """

    def __init__(self, report: Report) -> None:
        self._contents = Contents(report, copied_bytes=sys.maxsize)

    def take(self, buffers: Mapping[str, Tensor], window: bool = True, whole: bool = False) -> dict[str, Tensor]:
        """Return a copy of each of ``buffers``, which must be all of the module's; nobody may write to the copies.

        Args:
            buffers: The buffers, by name.
            window: Whether a window of batches begins.
            whole: Whether everything is compared, whatever its size.
        """
        return {name: held.copy for name, held in self.watch(buffers, window, whole).items()}

    def watch(self, buffers: Mapping[str, Tensor], window: bool, whole: bool = False) -> dict[str, Held]:
        """Bring the copies up to date; see `take`. Return what is watched, by name."""
        found = {name: self._contents.add(buffer, f"module.{name}") for name, buffer in buffers.items()}
        self._contents.keep(map(id, buffers.values()))
        self._contents.refresh(window, whole)
        return found

    def put_back(self, buffers: Mapping[str, Tensor], copies: Mapping[str, Tensor]) -> None:
        """Write copies, which `take` or another rank has made, into the buffers of the same names."""
        for name, buffer in buffers.items():
            if name in copies:
                self._contents.add(buffer, f"module.{name}").put_back(copies[name].to(buffer.device))


class BufferSync:
    """Gives one rank's buffers to all ranks of a group, before the snapshot of a step's tail is taken.

    DDP does so at the start of the next forward pass. The effect on every forward pass that follows is the same.
    Buffers that no rank has written to are not sent.

    Args:
        module: The module.
        copies: The copies of its buffers, which show what has changed.
        wait: Waits for the collective on a tensor.
    """

    def __init__(self, module: nn.Module, copies: BufferCopies, wait: Callable[[Work, Tensor], None]) -> None:
        self._module, self._copies, self._wait = module, copies, wait
        self._tree: Tree | None = None
        self._sent: dict[str, tuple[Held, int]] = {}

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
        watched = self._copies.watch(buffers, window=False)
        flags = torch.tensor([self._has_changed(name, held) for name, held in watched.items()], dtype=torch.uint8)
        self._wait(dist.all_reduce(flags, op=dist.ReduceOp.MAX, group=group, async_op=True), flags)
        agreed = {name: buffers[name] for name, flag in zip(buffers, flags.tolist(), strict=True) if flag}
        with torch.no_grad():
            for kind in _by_kind(agreed.values()):
                self._broadcast(kind, group, source)
        for name in agreed:
            if group.rank() != source:
                watched[name].take()
            self._sent[name] = watched[name], watched[name].changes

    def forget(self) -> None:
        """Count all buffers as changed; called after a fault."""
        self._sent = {}

    def _has_changed(self, name: str, held: Held) -> bool:
        return self._sent.get(name) != (held, held.changes)

    def _broadcast(self, buffers: list[Tensor], group: dist.ProcessGroup, source: int) -> None:
        flat = torch.cat([buffer.detach().reshape(-1) for buffer in buffers])
        self._wait(dist.broadcast(flat, group=group, group_src=source, async_op=True), flat)
        if group.rank() != source:
            for buffer, part in zip(buffers, flat.split([b.numel() for b in buffers]), strict=True):
                buffer.copy_(part.view(buffer.shape))


def _by_kind(buffers: Iterable[Tensor]) -> list[list[Tensor]]:
    kinds: dict[tuple[torch.dtype, torch.device], list[Tensor]] = {}
    for buffer in buffers:
        if buffer.numel():
            kinds.setdefault((buffer.dtype, buffer.device), []).append(buffer)
    return list(kinds.values())
