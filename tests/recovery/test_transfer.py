from typing import Any

import pytest
import torch

from lightning_replica import works
from lightning_replica.devices.cpu import abort_group
from lightning_replica.errors import CollectiveError
from lightning_replica.recovery import transfer
from lightning_replica.recovery.groups import ProcessGroups
from lightning_replica.recovery.transfer import Channel
from tests.support.ranks import run_ranks


def wait(work: Any) -> None:
    works.wait(work, lambda: None)


def groups(rank: int, store: Any, world_size: int) -> ProcessGroups:
    opened = ProcessGroups(store, rank, world_size, "gloo", 60, abort_group)
    opened.open(0, tuple)
    return opened


def move(rank: int, store: Any) -> Any:
    transfer.CHUNK_BYTES = 1000
    opened = groups(rank, store, 3)
    plain, data = {"a": [1, 0.1 + 0.2], "b": None}, b"x" * 3001
    tensor = torch.arange(2500, dtype=torch.float64) / 7
    if rank == 0:
        return "not concerned"
    with Channel(2, 1, opened, wait) as channel:
        if rank == 2:
            channel.send_plain(plain)
            channel.send_bytes(b"")
            channel.send_bytes(data)
            channel.send(tensor)
            return channel.bytes_moved
        received = torch.zeros(2500, dtype=torch.float64)
        return [
            channel.receive_plain() == plain,
            channel.receive_bytes() == b"",
            channel.receive_bytes() == data,
            channel.receive(received) is None and torch.equal(received, tensor),
        ]


def test_everything_arrives() -> None:
    idle, target, source = run_ranks(3, move)
    assert idle == "not concerned"
    assert target == [True] * 4
    assert source > 2500 * 8 + 3001


def spoil(rank: int, store: Any) -> Any:
    opened = groups(rank, store, 2)
    with Channel(0, 1, opened, wait) as channel:
        if rank == 0:
            transfer._crc = lambda chunk: 12345
            channel.send(torch.ones(10))
        else:
            channel.receive(torch.ones(10))


def test_a_damaged_chunk_is_an_error() -> None:
    source, target = run_ranks(2, spoil)
    assert source is None
    assert "Chunk 0 of 40 bytes from rank 0 arrived damaged" in target["raised"]


def reopen(rank: int, store: Any) -> Any:
    import sys

    hook = sys.excepthook
    opened = groups(rank, store, 2)
    for generation in range(1, 4):
        opened.close()
        opened.open(generation, tuple)
        wait(torch.distributed.all_reduce(torch.ones(1), async_op=True))
    opened.close()
    return sys.excepthook is hook and not torch.distributed.is_initialized()


def test_groups_open_and_close_again_and_again() -> None:
    assert run_ranks(2, reopen) == [True, True]


def test_a_group_that_cannot_be_opened() -> None:
    with pytest.raises(CollectiveError, match="Could not open the process groups of generation 0"):
        ProcessGroups(torch.distributed.HashStore(), 0, 2, "gloo", 0.2, abort_group).open(0, tuple)
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()
