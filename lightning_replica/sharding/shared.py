"""Shared memory: ranks of a node read each other's memory, and what stays on the node goes through no socket.

A rank writes its gradients and its shard's values into memory that all others have mapped, and signals "ready" in a
collective of one number (`SharedMemory.fence`). A rank that needs a piece then reads it where it lies. Collectives keep
two purposes: they signal when memory can be read, and they fail when a rank is gone.

[Note: fences]
A rank writes only to its own memory. It may overwrite what others read there only after a fence that every reader
enters once it has finished reading:

| memory | others read it | fence before the next write |
|---|---|---|
| ``grads``, other blocks than the own | after the fence of their bucket | the commit |
| ``grads``, averages on one node | after the second fence of a reduction | the commit |
| ``grads``, whole | after `Reducer.finish` | the agreement on who has a gradient (`ShardedState._expose`) |
| ``main`` | in the parameter gather | `SharedMemory.release`, waited for before the next update |
| ``params``, the own block | in the gather, where replicas have several nodes | the end of the gather (see below) |
| ``params``, the own shard | in `in_place.gather_in_place` | the second fence there |

Averages of block l that other ranks send may arrive in ``grads`` without a fence: the sum of this node's rank at
position l is part of them, so that rank has finished reading block l here.

User code may write to ``params`` at any time, so a gather that reads them ends only when all ranks have read.

After a fault all live ranks meet in REGROUP before any rank writes, and by then each has left its step. A dead rank's
memory stays mapped in the ranks that read it: they read what it had signalled as ready, or nothing.
"""

import mmap
import os
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Literal

import torch
import torch.distributed as dist
from torch import Tensor

from lightning_replica.core.machine import machine
from lightning_replica.core.pending_work import Check, Work, track, wait
from lightning_replica.groups.membership import Groups
from lightning_replica.sharding import collectives
from lightning_replica.sharding.layout import Bucket, Range

_ALIGN = 4096


class Block:
    """Flat tensors that other processes of this machine can map, if the platform has such memory.

    Args:
        grads_numel: Number of elements of ``grads``.
        local_numel: Number of elements of ``main``.
        params_numel: Number of elements of ``params``.
        dtypes: Dtypes of ``grads``, ``main`` and ``params``.
        device: Device of all tensors.
        shared: Whether other processes must be able to map ``grads`` and ``main``, which then lie in the host's memory.
        params_shared: Whether they must be able to map ``params``, too.
    """

    def __init__(
        self,
        grads_numel: int,
        local_numel: int,
        params_numel: int,
        dtypes: tuple[torch.dtype, torch.dtype, torch.dtype],
        device: torch.device,
        shared: bool,
        params_shared: bool = False,
    ) -> None:
        self._file = -1
        self._shape = _Shape((grads_numel, local_numel, params_numel if params_shared else 0), dtypes)
        if shared and hasattr(os, "memfd_create"):
            # Unlike /dev/shm, a memfd has no size limit of its own, and a killed process leaves nothing behind.
            self._file = os.memfd_create("lightning_replica")
            os.ftruncate(self._file, self._shape.nbytes)
            views = self._shape.views(self._file)
            self.grads, self.main, self.params = views.grads, views.main, views.params
        else:
            self.grads = torch.zeros(grads_numel, dtype=dtypes[0], device=device)
            self.main = torch.zeros(local_numel, dtype=dtypes[1], device=device)
        if self._file < 0 or not params_shared:
            self.params = torch.zeros(params_numel, dtype=dtypes[2], device=device)

    def of_another(self, path: str, local_numel: int) -> "Views":
        """Map the block of another rank of this machine.

        Args:
            path: Path of its file.
            local_numel: Number of elements of its ``main``.

        Raises:
            OSError: If it cannot be mapped.
        """
        file = os.open(path, os.O_RDWR)
        try:
            grads_numel, _, params_numel = self._shape.numels
            return _Shape((grads_numel, local_numel, params_numel), self._shape.dtypes).views(file)
        finally:
            os.close(file)  # the mapping stays

    def views(self) -> "Views":
        """Return the tensors of this block."""
        return Views(self.grads, self.main, self.params)

    @property
    def file(self) -> int:
        """The file descriptor under which other processes of this machine find the memory; -1 if they cannot."""
        return self._file

    def __del__(self) -> None:
        if self._file >= 0:
            os.close(self._file)


@dataclass(frozen=True)
class Views:
    """The tensors of a block. ``params`` is empty if the block does not share it."""

    grads: Tensor
    main: Tensor
    params: Tensor


@dataclass(frozen=True)
class _Shape:
    """How a block's tensors lie in its file."""

    numels: tuple[int, int, int]
    dtypes: tuple[torch.dtype, torch.dtype, torch.dtype]

    @property
    def nbytes(self) -> int:
        """The size of the file."""
        return self._ends[-1] + _ALIGN  # never empty

    @property
    def _ends(self) -> list[int]:
        sizes = (numel * dtype.itemsize for numel, dtype in zip(self.numels, self.dtypes, strict=True))
        return list(accumulate(-(-size // _ALIGN) * _ALIGN for size in sizes))

    def views(self, file: int) -> Views:
        """Map a file that has this shape."""
        memory = mmap.mmap(file, 0)
        starts = [0, *self._ends[:-1]]
        found = [
            torch.frombuffer(memory, dtype=dtype, count=numel, offset=start) if numel else torch.zeros(0, dtype=dtype)
            for numel, dtype, start in zip(self.numels, self.dtypes, starts, strict=True)
        ]
        return Views(*found)


class SharedMemory:
    """Moves a step's data over shared memory between the ranks of a node; the counterpart of `collectives`.

    Args:
        groups: The process groups.
        node: The group of the ranks on this node.
        check: Raises when waiting has become pointless.
        windows: The memory of every rank of the node, in order of position, by the id of this rank's block.
    """

    def __init__(
        self, groups: Groups, node: dist.ProcessGroup, check: Check, windows: dict[int, Sequence[Views]]
    ) -> None:
        self._groups, self._node, self._check, self._windows = groups, node, check, windows
        self._own = groups.grid.local_of(groups.rank)
        self._released: Work = None

    def fence(self) -> None:
        """Wait until every rank has called this. Then all ranks can read what each rank wrote before the call."""
        wait(self.signal(), self._check)

    def signal(self) -> Work:
        """Signal to the other ranks that they can read what this rank wrote; return what to wait for before reading."""
        return track(dist.all_reduce(torch.zeros(1), group=self._node, async_op=True))

    def release(self) -> None:
        """Signal to the other ranks that this rank has read what it needs; do not wait."""
        self._released = self.signal()

    def reclaim(self) -> None:
        """Wait until all other ranks have read what they need of this rank's ``main`` or ``params``."""
        work, self._released = self._released, None
        wait(work, self._check)

    def add_up(self, block: Block, where: Range, divisor: float) -> None:
        """Write the sum of all ranks' gradients in a range, divided by ``divisor``, to ``block.grads``.

        Gradients are added up in order of position, in 32 bits if they have 16.
        """
        rows = [views.grads[where.start : where.stop] for views in self._windows[id(block)]]
        collectives.add_up(rows, block.grads[where.start : where.stop], divisor)

    def take(self, kind: Literal["grads", "params"], block: Block, where: Range, position: int) -> None:
        """Copy a range of ``grads`` or ``params`` from the rank at ``position`` on this node."""
        if position != self._own:
            source = getattr(self._windows[id(block)][position], kind)
            _copy(getattr(block, kind), where, source, where)

    def gather(self, block: Block, bucket: Bucket, params: Tensor) -> None:
        """Fill the bucket's parameters from the values of the shards of this replica, which is all on this node."""
        grid, windows = self._groups.grid, self._windows[id(block)]
        holders = [grid.local_of(rank) for rank in grid.replica_ranks(self._groups.rank)]
        for piece in range(grid.size):
            source = windows[holders[grid.shard_at(piece)]].main
            _copy(params, bucket.pieces[piece], source, bucket.locals[piece])


def connect(groups: Groups, check: Check, blocks: Sequence[tuple[Block, Sequence[int]]]) -> SharedMemory | None:
    """Map the blocks of all ranks of this node. Collective: every rank has laid out the same buffers.

    Args:
        groups: The process groups.
        check: Raises when waiting has become pointless.
        blocks: The blocks of this rank, each with the number of elements of ``main`` in that of each shard.

    Returns:
        The shared memory; None on every rank of the node if some rank cannot map the memory of another.
    """
    if groups.node is None:
        return None
    grid, group = groups.grid, groups.node
    own = torch.tensor([machine(), os.getpid(), *(block.file for block, _ in blocks)])
    table = [torch.empty_like(own) for _ in range(group.size())]
    wait(track(dist.all_gather(table, own, group=group, async_op=True)), check)
    windows: dict[int, Sequence[Views]] | None = None
    if all(int(row[0]) == int(own[0]) and all(file >= 0 for file in row[2:].tolist()) for row in table):
        shards = [grid.shard_of(rank) for rank in grid.node_ranks(groups.rank)]
        paths = [[f"/proc/{row[1]}/fd/{file}" for file in row[2:].tolist()] for row in table]
        try:
            windows = {
                id(block): [
                    block.views()
                    if position == group.rank()
                    else block.of_another(paths[position][number], main_numels[shard])
                    for position, shard in enumerate(shards)
                ]
                for number, (block, main_numels) in enumerate(blocks)
            }
        except OSError:
            windows = None
    failed = torch.tensor([float(windows is None)])
    wait(track(dist.all_reduce(failed, group=group, async_op=True)), check)
    return None if windows is None or failed.item() else SharedMemory(groups, group, check, windows)


def _copy(to: Tensor, where: Range, source: Tensor, source_range: Range) -> None:
    to[where.start : where.stop].copy_(source[source_range.start : source_range.stop])
