"""Shared memory: ranks of one machine read each other's memory, and a step sends no bytes through sockets.

A rank writes its gradients and its shard's values into memory that all others have mapped, and signals "ready" in a
collective of one number (`SharedMemory.fence`). A rank that needs a piece then reads it where it lies. Collectives keep
two purposes: they signal when memory can be read, and they fail when a rank is gone.

[Note: fences]
A rank writes only to its own memory. It may overwrite what others read there only after a fence that every reader
enters once it has finished reading:

| memory | others read it | fence before the next write |
|---|---|---|
| ``grads`` | after the first fence of a reduction, then the averages after the second | the commit |
| ``grads``, whole | after `Reducer.finish` | the agreement on who has a gradient (`ShardedState._expose`) |
| ``main`` | in the parameter gather | `SharedMemory.release`, waited for before the next update |

After a fault all live ranks meet in REGROUP before any rank writes, and by then each has left its step. A dead rank's
memory stays mapped in the ranks that read it: they read what it had signalled as ready, or nothing.
"""

import mmap
import os
from collections.abc import Callable, Sequence
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor

from lightning_replica.core.works import Check, Work, track, wait
from lightning_replica.groups.membership import Groups
from lightning_replica.sharding.layout import Bucket, Layout, Range

_ALIGN = 4096
_CHUNK = 2**18  # elements that are summed at a time: they stay in the cache


class Block:
    """Two flat tensors that other processes of this machine can map, if the platform has such memory.

    Args:
        grads_numel: Number of elements of ``grads``.
        main_numel: Number of elements of ``main``.
        dtype: Dtype of ``grads``.
        main_dtype: Dtype of ``main``.
        device: Device of both.
        shared: Whether other processes must be able to map the tensors, which then lie in the host's memory.
    """

    def __init__(
        self,
        grads_numel: int,
        main_numel: int,
        dtype: torch.dtype,
        main_dtype: torch.dtype,
        device: torch.device,
        shared: bool,
    ) -> None:
        self._file = -1
        if shared and hasattr(os, "memfd_create"):
            # Unlike /dev/shm, a memfd has no size limit of its own, and a killed process leaves nothing behind.
            self._file = os.memfd_create("lightning_replica")
            os.ftruncate(self._file, _offset(grads_numel, dtype) + main_numel * main_dtype.itemsize + _ALIGN)
            self.grads, self.main = _views(self._file, grads_numel, main_numel, dtype, main_dtype)
        else:
            self.grads = torch.zeros(grads_numel, dtype=dtype, device=device)
            self.main = torch.zeros(main_numel, dtype=main_dtype, device=device)

    @property
    def file(self) -> int:
        """The file descriptor under which other processes of this machine find the memory; -1 if they cannot."""
        return self._file

    def __del__(self) -> None:
        if self._file >= 0:
            os.close(self._file)


class Windows:
    """One rank's views of all members' memory for one flat buffer.

    Args:
        own: This rank's block.
        paths: The path of every rank's block.
        place: This rank's place in the grid.
        layout: The layout of the buffer.

    Raises:
        OSError: If another rank's memory cannot be mapped.
    """

    def __init__(self, own: Block, paths: Sequence[str], place: int, layout: Layout) -> None:
        self.grads: list[Tensor] = []
        self.main: list[Tensor] = []
        for other, path in enumerate(paths):
            if other == place:
                grads, main = own.grads, own.main
            else:
                file = os.open(path, os.O_RDWR)
                try:
                    numel = layout.local_numels[layout.grid.shard_at(other)]
                    grads, main = _views(file, layout.world_numel, numel, own.grads.dtype, own.main.dtype)
                finally:
                    os.close(file)  # the mapping stays
            self.grads.append(grads)
            self.main.append(main)


class SharedMemory:
    """Moves a step's data over shared memory; the counterpart of `collectives`' exchange, share and gather.

    Args:
        groups: The process groups.
        check: Raises when waiting has become pointless.
        windows: The windows of every buffer, by the id of its block.
    """

    def __init__(self, groups: Groups, check: Check, windows: dict[int, Windows]) -> None:
        self._groups, self._check, self._windows = groups, check, windows
        self._released: Work = None

    def fence(self) -> None:
        """Wait until every rank has called this. Then all ranks can read what each rank wrote before the call."""
        wait(self._launch(), self._check)

    def release(self) -> None:
        """Signal to the other ranks that this rank has read what it needs; do not wait."""
        self._released = self._launch()

    def reclaim(self) -> None:
        """Wait until all other ranks have read what they need of this rank's ``main``."""
        work, self._released = self._released, None
        wait(work, self._check)

    def average(self, block: Block, bucket: Bucket) -> None:
        """Average all ranks' gradients into the own piece.

        Gradients are added up in order of place, in 32 bits if they have 16.
        """
        rows = self._windows[id(block)].grads
        piece = bucket.pieces[self._groups.place]
        wide = torch.float32 if block.grads.dtype in (torch.float16, torch.bfloat16) else block.grads.dtype
        total = torch.empty(min(_CHUNK, piece.numel), dtype=wide)
        for start in range(piece.start, piece.stop, _CHUNK):
            stop = min(start + _CHUNK, piece.stop)
            part = total[: stop - start].copy_(rows[0][start:stop])
            for row in rows[1:]:
                part.add_(row[start:stop])
            torch.div(part, len(rows), out=block.grads[start:stop])

    def take_averages(self, block: Block, bucket: Bucket, pieces: Sequence[int], source: Callable[[int], int]) -> None:
        """Copy pieces of ``grads`` from the ranks that have them.

        Args:
            block: This rank's memory.
            bucket: The bucket.
            pieces: The pieces to copy.
            source: Returns the place of the rank to copy a piece from.
        """
        rows = self._windows[id(block)].grads
        for piece in pieces:
            if source(piece) != self._groups.place:
                _copy(block.grads, bucket.pieces[piece], rows[source(piece)], bucket.pieces[piece])

    def gather(self, block: Block, bucket: Bucket, params: Tensor) -> None:
        """Fill the bucket's parameters from the values of the shards of this replica."""
        grid, rows = self._groups.grid, self._windows[id(block)].main
        holders = grid.replica_places(self._groups.rank)
        for piece in range(grid.size):
            _copy(params, bucket.pieces[piece], rows[holders[grid.shard_at(piece)]], bucket.locals[piece])

    def _launch(self) -> Work:
        return track(dist.all_reduce(torch.zeros(1), group=self._groups.members, async_op=True))


def connect(groups: Groups, check: Check, blocks: Sequence[tuple[Block, Layout]]) -> SharedMemory | None:
    """Map all members' blocks. Collective: every member has laid out the same buffers.

    Returns:
        The shared memory; None on every rank if some rank cannot map the memory of another.
    """
    own = torch.tensor([_machine(), os.getpid(), *(block.file for block, _ in blocks)])
    table = [torch.empty_like(own) for _ in range(groups.grid.size)]
    wait(track(dist.all_gather(table, own, group=groups.members, async_op=True)), check)
    windows = None
    if all(int(row[0]) == int(own[0]) and min(row[2:].tolist()) >= 0 for row in table):
        paths = [[f"/proc/{row[1]}/fd/{file}" for file in row[2:].tolist()] for row in table]
        try:
            windows = {
                id(block): Windows(block, [row[number] for row in paths], groups.place, layout)
                for number, (block, layout) in enumerate(blocks)
            }
        except OSError:
            windows = None
    failed = torch.tensor([float(windows is None)])
    wait(track(dist.all_reduce(failed, group=groups.members, async_op=True)), check)
    return None if windows is None or failed.item() else SharedMemory(groups, check, windows)


def _machine() -> int:
    """Return a number that ranks have in common if they run under one kernel and see the same processes."""
    boot = Path("/proc/sys/kernel/random/boot_id")
    if not boot.exists():
        return -1
    processes = os.stat("/proc/self/ns/pid").st_ino
    return (int(boot.read_text().replace("-", ""), 16) ^ processes) % 2**62


def _views(
    file: int, grads_numel: int, main_numel: int, dtype: torch.dtype, main_dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    memory = mmap.mmap(file, 0)
    grads = torch.frombuffer(memory, dtype=dtype, count=grads_numel)
    if not main_numel:
        return grads, torch.zeros(0, dtype=main_dtype)
    return grads, torch.frombuffer(memory, dtype=main_dtype, count=main_numel, offset=_offset(grads_numel, dtype))


def _offset(grads_numel: int, dtype: torch.dtype) -> int:
    """Return the byte at which ``main`` begins."""
    return -(-grads_numel * dtype.itemsize // _ALIGN) * _ALIGN


def _copy(to: Tensor, where: Range, source: Tensor, there: Range) -> None:
    to[where.start : where.stop].copy_(source[there.start : there.stop])
