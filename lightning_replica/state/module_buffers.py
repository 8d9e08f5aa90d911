"""A module's buffers, such as BatchNorm's statistics: each rank's own, and those that all ranks share.

[Note: shared buffers]
As under DDP, a forward pass gives the first rank's buffers to all ranks, and what a rank writes is its own until the
next one. But the first rank may be lost in between. So its buffers are sent in the commit already, into copies beside
the module: the shared ones. All ranks hold the same, so any of them can give them to a replacement, or save them. Where
a window begins, they go into the module.

What differs from the shared buffers is a rank's own. It belongs to the private state, which peers keep.
"""

import sys
from collections.abc import Callable, Mapping
from typing import Final

import torch
import torch.distributed as dist
from torch import Tensor, nn

from lightning_replica._compat.tree import Tree
from lightning_replica.core import plain
from lightning_replica.core.inexact import Report
from lightning_replica.core.pending_work import Work
from lightning_replica.core.ranges import ranged
from lightning_replica.devices.host import on_host
from lightning_replica.state.objects.contents import Contents, Held, plain_of, same_pairs

OWN_BYTES: Final = 2**22
"""Size of a rank's own buffers up to which peers keep them."""


class BufferCopies:
    """Copies of a module's buffers, made again only for the buffers that have changed. Nobody may write to them.

    Args:
        report: Called with a write that is found late, and with what peers do not keep.

    Attributes:
        shared: The buffers that are the same on all ranks, by name.
        own: The copies of this rank's buffers that differ from these when a snapshot was last taken, by name.
        due: Whether the next forward pass begins with the shared buffers. Under DDP, one does that follows a pass after
            which gradients were reduced.
    """

    def __init__(self, report: Report) -> None:
        self._report = report
        self._contents = Contents(report, copied_bytes=sys.maxsize)
        self.shared: dict[str, Tensor] = {}
        self.own: dict[str, Tensor] = {}
        self.due = True

    def take(self, buffers: Mapping[str, Tensor], window: bool = True, whole: bool = False) -> dict[str, Tensor]:
        """Bring the copies up to date, and return the shared ones; this rank's own, where nothing has been shared yet.

        Args:
            buffers: All buffers of the module, by name.
            window: Whether a window of batches begins.
            whole: Whether everything is compared, whatever its size.
        """
        held = self.watch(buffers, window, whole)
        self.shared = {name: copy for name, copy in self.shared.items() if name in held}  # some may be gone
        copies: dict[str, Tensor] = {name: each.copy for name, each in held.items()}
        taken = copies | self.shared
        self.own = {name: copy for name, copy in copies.items() if copy is not taken[name]}
        return taken

    def watch(self, buffers: Mapping[str, Tensor], window: bool, whole: bool = False) -> dict[str, Held]:
        """Bring the copies up to date; see `take`. Return what is watched, by name."""
        found = {name: self._contents.add(buffer, f"module.{name}") for name, buffer in buffers.items()}
        self._contents.keep(map(id, buffers.values()))
        self._contents.refresh(window, whole)
        return found

    def packed(self) -> bytes:
        """Return `own` as peers keep it; empty if there is none, or too much."""
        if not self.own:
            return b""
        if sum(copy.nbytes for copy in self.own.values()) <= OWN_BYTES:
            return plain.pack(_on_host(self.own))
        names = [f"module.{name}" for name in self.own]
        named = ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")
        self._report(
            named,
            "they are large, and peers do not keep what differs between ranks there: a replaced rank has what all ranks"
            " share",
            "replacement",
        )
        return b""

    def put_back(self, buffers: Mapping[str, Tensor], shared: Mapping[str, Tensor], own: Mapping[str, Tensor]) -> None:
        """Write copies, which `take` or another rank has made, into the buffers of the same names.

        Args:
            buffers: All buffers of the module, by name.
            shared: The shared copies.
            own: The copies that this rank has instead.
        """
        self.shared = {name: shared[name].to(buffer.device) for name, buffer in buffers.items() if name in shared}
        self.own = {name: copy.to(buffers[name].device) for name, copy in own.items() if name in buffers}
        for name, copy in {**self.shared, **self.own}.items():
            self._put(name, buffers[name], copy)

    def follow(self, own: Mapping[str, Tensor]) -> None:
        """Share what the first rank had of its own; ``own`` is what it has packed."""
        self.shared |= {name: copy.to(self.shared[name].device) for name, copy in own.items() if name in self.shared}

    def load(self, buffers: Mapping[str, Tensor], own: Mapping[str, Tensor]) -> None:
        """Take the buffers of a checkpoint, which the module holds, for the shared ones; see `put_back`."""
        self.put_back(buffers, self.take(buffers), own)

    def give(self, buffers: Mapping[str, Tensor]) -> None:
        """If that is due, write the shared copies into the buffers where those differ."""
        due, self.due = self.due, False
        if not due:
            return
        for name, buffer in buffers.items():
            held = self._contents.held.get(id(buffer))
            if name in self.shared and (held is None or held.copy is not self.shared[name]):
                self._put(name, buffer, self.shared[name])

    def _put(self, name: str, buffer: Tensor, copy: Tensor) -> None:
        held = self._contents.add(buffer, f"module.{name}")
        held.put_back(copy, still_learns=True)  # `reachable` restores whether it does
        held.copy = copy


class BufferSync:
    """Makes the buffers of one rank of a group the shared ones, and gives them to all. See [Note: shared buffers].

    Args:
        module: The module.
        copies: The copies of its buffers, which show what has changed.
        wait: Waits for the collective on a tensor.
    """

    def __init__(self, module: nn.Module, copies: BufferCopies, wait: Callable[[Work, Tensor], None]) -> None:
        self._module, self._copies, self._wait = module, copies, wait
        self._tree: Tree | None = None
        self._all = True

    @ranged("module_buffers")
    def share(self, group: dist.ProcessGroup, source: int, then_give: bool) -> None:
        """Share one rank's buffers; those that have not changed since the last time are not sent. Collective.

        Args:
            group: The ranks.
            source: The rank in the group whose buffers are shared.
            then_give: Whether the next `give` is due.
        """
        self._copies.due |= then_give
        buffers = self._buffers()
        if not buffers:
            return
        shared, watched = self._copies.shared, self._copies.watch(buffers, window=False)
        changed = [self._all or each.copy is not shared.get(name) for name, each in watched.items()]
        flags = torch.tensor(changed, dtype=torch.uint8)
        self._wait(dist.broadcast(flags, group=group, group_src=source, async_op=True), flags)
        sent = {name: held.copy for (name, held), flag in zip(watched.items(), flags.tolist(), strict=True) if flag}
        for kind in _by_kind(sent):
            shared |= self._broadcast(kind, group, source)
        self._all = False

    def give(self) -> None:
        """Write the shared buffers into the module, if that is due."""
        self._copies.give(self._buffers())

    def forget(self) -> None:
        """Send all buffers the next time; called after a fault."""
        self._all = True

    def shared(self) -> dict[int, Tensor]:
        """Return the shared copies of the module's buffers, by the buffers' ``id``."""
        shared = self._copies.shared
        return {id(each): shared[name] for name, each in self._buffers().items() if name in shared}

    def _buffers(self) -> dict[str, Tensor]:
        self._tree = Tree.of(self._module, self._tree)
        return self._tree.buffers

    def _broadcast(self, own: dict[str, Tensor], group: dist.ProcessGroup, source: int) -> dict[str, Tensor]:
        """Return what the source holds where this rank holds ``own``, which itself is returned where it is the same."""
        name, first = next(iter(own.items()))
        buffer = plain_of(self._buffers()[name])
        flat: Tensor = buffer.new_empty(sum(copy.numel() for copy in own.values()), dtype=first.dtype)
        torch.cat([copy.reshape(-1) for copy in own.values()], out=flat)
        if flat.numel():
            self._wait(dist.broadcast(flat, group=group, group_src=source, async_op=True), flat)
        if group.rank() == source:
            return own
        parts = flat.split([copy.numel() for copy in own.values()])
        came = {name: part.view(copy.shape) for part, (name, copy) in zip(parts, own.items(), strict=True)}
        same = same_pairs([(came[name], copy) for name, copy in own.items()])
        return {name: own[name] if equal else came[name].clone() for name, equal in zip(own, same, strict=True)}


def _by_kind(copies: Mapping[str, Tensor]) -> list[dict[str, Tensor]]:
    """Divide copies by dtype and device."""
    kinds: dict[tuple[torch.dtype, torch.device], dict[str, Tensor]] = {}
    for name, copy in copies.items():
        kinds.setdefault((copy.dtype, copy.device), {})[name] = copy
    return list(kinds.values())


def _on_host(copies: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return copies on the host; wait for the device once for each dtype."""
    found = dict(copies)
    for kind in _by_kind(copies):
        if not all(map(on_host, kind.values())):
            flat = torch.cat([copy.reshape(-1) for copy in kind.values()]).cpu()
            parts = flat.split([copy.numel() for copy in kind.values()])
            found |= {name: part.view(kind[name].shape) for name, part in zip(kind, parts, strict=True)}
    return found
