"""The collectives of a step.

The primitive for each backend is chosen here and nowhere else. On gloo (benchmarks/step_time.py measures the whole
step), ranks exchange pieces with all_to_all_single, and gather pieces with in-place all-gathers, or broadcasts where
pieces are few or differ in size. Unlike hand-made isend / irecv, these can be waited for in slices: an expired wait on
a gloo point-to-point work closes every connection of the group, an expired wait on a collective leaves it valid
(tests/sharding/test_collectives.py).
"""

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from lightning_replica._compat.torch import all_gather_single
from lightning_replica.core.pending_work import Check, Ordered, Work, track, wait
from lightning_replica.devices import host
from lightning_replica.sharding.layout import Range

# gloo's all-gathers take longer than so many broadcasts: a step of 4 ranks over sockets 1.21 instead of 1.07 of DDP's.
_FEW = 4
_CHUNK = 2**18  # elements that are added up at a time: they stay in the cache


def exchange(sent: Tensor, numels: Sequence[int], received: Tensor, group: dist.ProcessGroup, on_host: bool) -> Work:
    """Begin to send every member of ``group`` its part of this rank's values.

    Args:
        sent: The parts for all members, in their order in the group.
        numels: Number of elements of each part.
        received: (size of the group * numel of the own part,) receives the own part from every member, in their order.
        group: The process group.
        on_host: See `Groups.on_host`.
    """
    if len(set(numels)) == 1:
        return begun(dist.all_to_all_single(received, sent, group=group, async_op=True), on_host)
    got = [numels[group.rank()]] * len(numels)
    return begun(dist.all_to_all_single(received, sent, got, list(numels), group=group, async_op=True), on_host)


def collect(flat: Tensor, parts: Sequence[Range], group: dist.ProcessGroup | None, on_host: bool) -> list[Work]:
    """Begin to fill ``parts`` of ``flat`` in place, each from the member of ``group`` whose part it is.

    Args:
        flat: (world_numel,) values, of which the own part is valid.
        parts: Ranges of ``flat``, one for each member, in their order in the group.
        group: The process group; None if this rank is its only member.
        on_host: See `Groups.on_host`.
    """
    if group is None or group.size() == 1:
        return []
    views = [flat[part.start : part.stop] for part in parts]
    if len({part.numel for part in parts}) > 1 or (on_host and len(parts) <= _FEW):
        sources = dist.get_process_group_ranks(group)
        return [
            begun(dist.broadcast(view, source, group=group, async_op=True), on_host)
            for view, source in zip(views, sources, strict=True)
            if view.numel()
        ]
    if not views[0].numel():
        return []
    own = views[group.rank()]
    if all(before.stop == after.start for before, after in zip(parts, parts[1:], strict=False)):
        whole = flat[parts[0].start : parts[-1].stop]
        return [begun(all_gather_single(whole, own, group), on_host)]
    return [begun(dist.all_gather(views, own, group=group, async_op=True), on_host)]


def all_reduce(vector: Tensor, group: dist.ProcessGroup, check: Check) -> None:
    """Add up ``vector`` over ``group``, in place; every rank gets the same bits."""
    wait(dist.all_reduce(vector, group=group, async_op=True), check)


def begun(work: "dist.Work | None", on_host: bool) -> Work:
    """Track a collective on gradients or parameters that has begun."""
    return track(work) if on_host or work is None else Ordered(work)


def add_up(rows: Tensor | Sequence[Tensor], out: Tensor, divisor: float) -> None:
    """Write the sum of ``rows``, divided by ``divisor``, to ``out``, which may be one of the rows.

    Rows are added up in their order, in 32 bits if they have 16.

    Args:
        rows: (n, numel) values, or n tensors of shape (numel,) in the host's memory.
        out: (numel,) receives the result, perhaps in another dtype than that of the rows.
        divisor: What the sum is divided by.
    """
    wide = torch.float32 if rows[0].dtype.itemsize == 2 else rows[0].dtype
    if isinstance(rows, Tensor) and not host.on_host(out):
        out.copy_(torch.sum(rows, 0, dtype=wide).div_(divisor))
        return
    total = torch.empty(min(_CHUNK, out.numel()), dtype=wide)
    for start in range(0, out.numel(), _CHUNK):
        stop = min(start + _CHUNK, out.numel())
        part = total[: stop - start].copy_(rows[0][start:stop])
        for row in rows[1:]:
            part.add_(row[start:stop])
        if out.dtype == wide:
            torch.div(part, divisor, out=out[start:stop])
        else:
            out[start:stop].copy_(part.div_(divisor))
