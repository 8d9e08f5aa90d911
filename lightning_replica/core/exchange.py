"""Sends bytes of any length from every rank to every rank."""

import torch
import torch.distributed as dist

from lightning_replica.core.pending_work import Check, wait


def all_gather_bytes(payload: bytes, group: dist.ProcessGroup, check: Check) -> list[bytes]:
    """Return every rank's payload, in order of rank in the group. Collective over ``group``."""
    sizes = [torch.zeros(1, dtype=torch.int64) for _ in range(group.size())]
    wait(dist.all_gather(sizes, torch.tensor([len(payload)]), group=group, async_op=True), check)
    longest = max(int(size) for size in sizes)
    message = torch.zeros(longest, dtype=torch.uint8)
    message[: len(payload)] = torch.frombuffer(bytearray(payload), dtype=torch.uint8)
    rows = [torch.empty_like(message) for _ in sizes]
    wait(dist.all_gather(rows, message, group=group, async_op=True), check)
    return [row[: int(size)].numpy().tobytes() for row, size in zip(rows, sizes, strict=True)]
